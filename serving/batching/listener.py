"""Events of a batcher, for metrics, logs, and a page that shows batches live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHED_QUEUE_FULL = "queue_full"
SHED_INFEASIBLE = "deadline_infeasible"
SHED_EXPIRED = "deadline_passed"
SHED_OVERLOAD = "overload"
"""Reason of a refusal before the batcher: more requests come than the process can read."""


class BatchListener:
    """A receiver of a batcher's events, called on the event loop. Methods do nothing here; none may raise or block."""

    def batch_started(self, runner: str, queue_s: Sequence[float]) -> None:
        """Note that a runner took a batch whose requests had waited `queue_s` seconds."""

    def batch_finished(self, runner: str, num_items: int, service_s: float, error: BaseException | None) -> None:
        """Note that a runner finished a batch after `service_s` seconds; `error` is set if all of it failed."""

    def batch_taken_back(self, runner: str, num_items: int) -> None:
        """Note that the last batch given to a runner is not run: the runner failed before it began.

        Its requests are run in other batches, which are reported as usual.
        """

    def shed(self, reason: str) -> None:
        """Note that a request is not run: `queue_full`, `deadline_infeasible` or `deadline_passed`."""

    def waiting(self, wait_s: float) -> None:
        """Note that a free runner will wait this long for more requests, unless they come sooner."""

    def runner_failed(self, runner: str, error: BaseException) -> None:
        """Note that a runner hangs or is lost."""


@dataclass(frozen=True)
class Process:
    """The process in which a runner computes.

    Args:
        node: id of its machine in the cluster.
        pid: its number there.
    """

    node: str
    pid: int


@dataclass(frozen=True)
class RunnerStats:
    """The work that one runner has done so far."""

    name: str
    num_batches: int
    """Number of batches without those that failed as a whole."""
    num_items: int
    process: Process | None = None
    """The process that computes it; None: not known."""


@dataclass(frozen=True)
class BatcherStats:
    """The state of a batcher at one moment."""

    num_queued: int
    num_in_flight: int
    num_runners: int
    num_answered: int
    num_batches: int
    num_shed: dict[str, int]
    wait_s: float
    """Wait that the policy chose last, in seconds."""
    a_s: float
    """Seconds that a batch costs regardless of its size, in the model of service time."""
    c_s: float
    """Seconds that each request adds to a batch."""
    start_s: float | None = None
    """Seconds from the first request that finds no runner to the first runner; None: not known."""
    runners: tuple[RunnerStats, ...] = ()
    """Statistics of the present runners."""
