"""The interface of a trial's program, and the state and progress that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


MODEL, OPTIMIZER, EXCHANGE, RESUME = "model/", "optimizer/", "exchange/", "resume/"
"""Prefixes of the names of a state's tensors: of the model, of its optimizer, and of what each replica of a gang keeps
for itself. The last is of what going on needs of the model besides.
"""
OF_REPLICAS = "of_replicas"
"""Key of a state's position under which a gang stores the arrangement of its replicas, for another gang to use."""


@dataclass(frozen=True)
class TrialState:
    """The complete state of a trial between two steps: handed to other trials, kept during pauses, and saved."""

    tensors: Mapping[str, Tensor]
    """Tensors named by `MODEL` or `OPTIMIZER` and a name; programs may add others, such as `EXCHANGE` of gangs."""
    position: Mapping[str, Any] = field(default_factory=dict)
    """Further state as JSON values."""


def taken_over(state: TrialState) -> TrialState:
    """Return a state of one trial with which another goes on: what ended the one does not end the other."""
    if state.position.get("stopped_by") is None:
        return state
    return replace(state, position={**state.position, "stopped_by": None, "num_worse": 0})


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a state whose names begin with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Progress:
    """The report of a trial after `advance`."""

    step: int
    metrics: Mapping[str, float]
    """Metrics of the last validation by name, and `train_loss`."""
    evaluations: tuple[Mapping[str, float], ...] = ()
    """Metrics of every validation since the last report, in order."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """Additional values for the method. JSON values."""
    is_over: bool = False
    """True if the trial is ended by a condition of its config: `until`, `early_stopping` or `time_limit_s`."""
    is_interrupted: bool = False
    """True if it stopped early on request. This is not a report: the same `advance` continues from there."""


class TrialProgram(Protocol):
    """A trial that runs in one process.

    It is created by calling its class with two keywords: `config` (the `TrainConfig` of the trial with its
    hyper-parameters) and the proposal's `arguments`.
    """

    def advance(self, step: int) -> Progress:
        """Train until `step` is completed, and validate.

        Raises:
            OrchestrayError: the training failed; the text says why.
        """

    def state(self) -> TrialState:
        """Return a copy of the state."""

    def load(self, state: TrialState, *, partly: bool = False) -> None:
        """Restore a state; with `partly`, take only the model's tensors whose names and shapes match."""

    def leave_run(self, directory: Path) -> None:
        """Write the files that `serve` needs: `model/`, `config.yaml`, `result.json`."""
