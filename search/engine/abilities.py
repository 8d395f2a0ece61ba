"""What a program of a trial may be able to do beside what every one does (`search.trials.program.TrialProgram`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.search.trials.program import TrialState


@runtime_checkable
class Stoppable(Protocol):
    """A program that can be asked, from another thread, to end `advance` after its current step.

    What `advance` then returns is interrupted, unless it was at its end; the next one is not, until asked again.
    """

    def request_stop(self) -> None: ...


@runtime_checkable
class Changeable(Protocol):
    """A program that goes on under another config with less work than building it anew."""

    def become(self, config: TrainConfig) -> None: ...


@runtime_checkable
class Heir(Protocol):
    """A program that can begin with the weights of another network."""

    def inherit(self, state: TrialState, *, overlap: bool = False) -> None: ...


@runtime_checkable
class CostlyToPause(Protocol):
    """A program for which to end `advance` and to go on again takes time of its own."""

    pause_cost_s: float
    """That the last time took; 0: not known yet."""


@runtime_checkable
class Closable(Protocol):
    """A program that holds what has to be given back."""

    def close(self) -> None: ...


@runtime_checkable
class Measured(Protocol):
    """A program that knows sizes of its network: `parameters`, `flops`, `latency_ms`."""

    def measures(self) -> dict[str, float]: ...


@runtime_checkable
class Foreseeing(Protocol):
    """A program that knows the names of its task's metrics before it has trained; None: not of this task.

    Where those that are `wanted` are among them it need not know the others.
    """

    def metric_names(self, wanted: Collection[str]) -> Collection[str] | None: ...
