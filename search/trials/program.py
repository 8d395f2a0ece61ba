"""What a trial does between two reports: train as any run does, or a program of a method's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


MODEL, OPTIMIZER, EXCHANGE = "model/", "optimizer/", "exchange/"
"""How the names of a state's tensors begin: of the model, of its optimizer, and what the replicas of a gang keep each
for itself."""
OF_REPLICAS = "of_replicas"
"""Where in the position of a state a gang tells how its replicas were arranged, for another like it."""


@dataclass(frozen=True)
class TrialState:
    """All that a trial is between two steps: what is handed to another, kept while it is held, and saved."""

    tensors: Mapping[str, Tensor]
    """`MODEL` and `OPTIMIZER` with a name; a program may have others, as a gang those of `EXCHANGE`."""
    position: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those of a state whose names begin so, without that."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Progress:
    """What a trial has to say."""

    step: int
    metrics: Mapping[str, float]
    """Of the last validation, and `train_loss`, by name."""
    evaluations: tuple[Mapping[str, float], ...] = ()
    """Of every validation since the last report, in order."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """For the method. JSON values."""
    is_over: bool = False
    """Whether it has ended of itself before the step that was asked for: the `until` of its config was reached."""
    is_interrupted: bool = False
    """Whether it was asked to stop, and did so on the way: no report; the same `advance` goes on from there."""


class TrialProgram(Protocol):
    """A trial that runs in one process.

    Made by calling its class with `config` (the `TrainConfig` of the trial, its hyper-parameters in place) and the
    proposal's `arguments` as keywords.
    """

    def advance(self, step: int) -> Progress:
        """Train until `step` is completed, and validate.

        Raises:
            OrchestrayError: the training failed; the text says why.
        """

    def state(self) -> TrialState:
        """A copy of what it is now."""

    def load(self, state: TrialState, *, partly: bool = False) -> None:
        """Become that state; with `partly` take only the tensors of the model whose names and shapes are there."""

    def leave_run(self, directory: Path) -> None:
        """Write what `serve` takes: `model/`, `config.yaml`, `result.json`."""
