"""The optional capabilities of a trial's program, in addition to `search.trials.program.TrialProgram`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from orchestray.search.trials.program import TrialState
    from orchestray.trainers.config.schema import TrainConfig


@runtime_checkable
class Stoppable(Protocol):
    """A program that can be asked, from another thread, to end `advance` after its current step.

    That `advance` then returns as interrupted, unless it was at its end; the next one is not affected.
    """

    def request_stop(self) -> None: ...


@runtime_checkable
class Changeable(Protocol):
    """A program that continues under another config with less work than a rebuild."""

    def become(self, config: TrainConfig) -> None: ...


@runtime_checkable
class InheritsWeights(Protocol):
    """A program that can start with the weights of another network."""

    def inherit(self, state: TrialState, *, overlap: bool = False) -> None: ...


@runtime_checkable
class PausesSlowly(Protocol):
    """A program that needs time of its own to end `advance` and to resume."""

    pause_cost_s: float
    """Seconds that the last pause took; 0: not known yet."""


@runtime_checkable
class Closable(Protocol):
    """A program that holds resources to release."""

    def close(self) -> None: ...


@runtime_checkable
class Measured(Protocol):
    """A program that knows measures of its network: `parameters`, `flops`, `latency_ms`."""

    def measures(self) -> dict[str, float]: ...


@runtime_checkable
class MeasuredUntrained(Measured, Protocol):
    """A program that knows them before it has trained."""

    @property
    def step(self) -> int:
        """Number of completed steps."""


@runtime_checkable
class KnowsMetrics(Protocol):
    """A program that knows the names of its task's metrics before training; None if it cannot tell.

    If all that are `wanted` are among them, it may leave out the others.
    """

    def metric_names(self, wanted: Collection[str]) -> Collection[str] | None: ...


@runtime_checkable
class MayLackValidation(Protocol):
    """A program whose task may have no validation data."""

    def has_validation(self) -> bool: ...
