"""What a batcher tells whoever counts: metrics, logs, a page that shows batches live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHED_QUEUE_FULL = "queue_full"
SHED_INFEASIBLE = "deadline_infeasible"
SHED_EXPIRED = "deadline_passed"
SHED_OVERLOAD = "overload"
"""More requests come than the process can read: it is refused before a batcher is asked."""


class BatchListener:
    """Is called from the event loop as things happen; the methods do nothing here, and must not raise or block."""

    def batch_started(self, runner: str, queue_s: Sequence[float]) -> None:
        """A runner took a batch; `queue_s`: how long each of its requests had waited, in seconds."""

    def batch_finished(self, runner: str, num_items: int, service_s: float, error: BaseException | None) -> None:
        """A runner is done with a batch after `service_s` seconds; `error` where all of it failed."""

    def batch_taken_back(self, runner: str, num_items: int) -> None:
        """The last batch that a runner took and that has not ended, is not run: it had not begun it when it failed.

        Its requests are run in other batches, which are told of as such.
        """

    def shed(self, reason: str) -> None:
        """A request is not run: `queue_full`, `deadline_infeasible` or `deadline_passed`."""

    def waiting(self, wait_s: float) -> None:
        """A free runner will wait this long for more requests, unless they come sooner."""

    def runner_failed(self, runner: str, error: BaseException) -> None:
        """A runner hangs or is lost."""


@dataclass(frozen=True)
class RunnerStats:
    """What one runner has done so far."""

    name: str
    num_batches: int
    """Those that failed as a whole are not counted."""
    num_items: int


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
    """The last wait that the policy chose."""
    a_s: float
    """The model of service time: seconds a batch costs whatever its size."""
    c_s: float
    """Seconds each request of a batch adds."""
    start_s: float | None = None
    """Seconds from the first request that finds no runner to the first runner; None: not known."""
    runners: tuple[RunnerStats, ...] = ()
    """Of those there are."""
