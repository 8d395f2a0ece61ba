"""The book-keeping of a replica's steps: metric lines, bytes, time, staleness."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestray.trainers.parallel.usage import UsageSum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from orchestray.platform.data.stream import Share
    from orchestray.platform.run.recorder import Recorder
    from orchestray.trainers.core.exchange import Exchange
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.loop.position import Position

_DRAIN_EVERY_STEPS = 1024


@dataclass
class Step:
    """A step that this worker has completed."""

    number: int
    epoch: int
    lr: float
    batch_samples: int
    began_s: float
    """Wall-clock time at which its share had arrived, in seconds."""
    num_samples: int = 0
    """Samples of this worker's share."""
    loss: float = 0.0
    """This worker's part of the batch's mean loss."""
    done_s: float = 0.0
    staleness: list[int] | None = None
    """Staleness of each update, where updates may be stale."""
    sums: list[float] = field(default_factory=list)
    """Loss, stop requests and workers past the time limit, summed along with the gradients."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Entries of optimizer and scheme for the metric line."""


@dataclass(frozen=True)
class Agreed:
    """The sums of all workers' reports on some steps; the same on each worker."""

    losses: list[float]
    """Mean loss of each step."""
    stop: float = 0.0
    """Number of workers that were asked to stop."""
    late: float = 0.0
    """Number of workers on which the time limit has passed."""
    bytes_sent: int = 0
    bytes_dense: int = 0
    """Bytes that would have been sent without compression."""


class StepLog:
    """A log of the steps of one worker. It counts from each connection on; staleness is counted over all of them."""

    def __init__(self, recorder: Recorder, exchange: Exchange) -> None:
        """
        Args:
            recorder: receives the metric lines.
            exchange: scheme whose bytes count.
        """
        self.recorder = recorder
        self.staleness: Counter[int] = Counter()
        """Number of updates by their staleness; empty for a synchronous scheme."""
        self.usage = UsageSum()
        self.started_at = time.time()
        """Wall-clock time from which lines count, in seconds."""
        self._exchange = exchange
        self._groups: Groups | None = None
        self._reported_bytes = self._bytes_before = self._saved_before = 0

    def begin(self, groups: Groups) -> None:
        """Start to count after connecting: bytes sent before are not part of the training."""
        self._groups = groups
        self.usage.begin(groups)
        self._reported_bytes = self._sent_bytes

    def shares(self, prepared: Iterable[Share]) -> Iterator[Share]:
        """Yield the same shares, and count each when it is taken."""
        return self.usage.count(prepared)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count time and bytes inside the context as those of steps."""
        assert self._groups is not None
        self._bytes_before = self._groups.bytes_sent
        self._saved_before = self._saved_bytes
        with self.usage.training(self._groups.waiting):
            yield

    # -- bytes ---------------------------------------------------------------------------------------------------------

    @property
    def _sent_bytes(self) -> int:
        """Bytes that this worker sent, or that a peer sent at its request and only this worker can count."""
        assert self._groups is not None
        return self._groups.bytes_sent + self._exchange.asked_bytes

    @property
    def _saved_bytes(self) -> int:
        """Bytes that this worker's compression has saved since the exchange was created."""
        return self._exchange.bytes_dense_total - self._exchange.bytes_sent_total

    def unreported_bytes(self) -> int:
        """Return the bytes sent since the last call."""
        sent = self._sent_bytes
        unreported, self._reported_bytes = sent - self._reported_bytes, sent
        return unreported

    def saved_bytes(self) -> int:
        """Return the bytes that this worker's compression has saved in the steps of this `training`."""
        return self._saved_bytes - self._saved_before

    def bytes_of_all(self, num_workers: int) -> tuple[int, int]:
        """Return the bytes that all workers sent in the steps of this `training`, and those without compression.

        Valid where all workers hold whole models and are in step: then they send equally many, or know the difference.
        """
        assert self._groups is not None
        beyond = self._exchange.bytes_beyond
        sent = (self._groups.bytes_sent - self._bytes_before) * num_workers + beyond
        return sent, sent + self.saved_bytes() * num_workers

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude the bytes sent inside the context, which are not part of the training."""
        assert self._groups is not None
        before, of_groups = self._sent_bytes, self._groups.bytes_sent
        yield
        self._reported_bytes += self._sent_bytes - before
        self._bytes_before += self._groups.bytes_sent - of_groups

    # -- lines ---------------------------------------------------------------------------------------------------------

    def complete(self, steps: Sequence[Step], agreed: Agreed, network: Network, position: Position) -> None:
        """Record steps on which all workers have agreed.

        Args:
            steps: the steps, in order.
            agreed: sums over all workers.
            network: network that was trained.
            position: position in the run, which moves on.
        """
        last: dict[str, Any] = {}
        self.usage.add(network.usage(), last, steps[-1].number)
        for step, loss in zip(steps, agreed.losses, strict=True):
            position.complete(step.number, step.epoch, step.batch_samples, loss)
            line = self.line(step.number, step.epoch, now_s=step.done_s, loss=loss, lr=step.lr)
            line["samples_per_s"] = step.batch_samples / max(step.done_s - step.began_s, 1e-9)
            line |= step.metrics
            if step.staleness is not None:
                line["staleness"] = max(step.staleness, default=0)
                self.staleness.update(step.staleness)
            line["bytes_sent"] = agreed.bytes_sent // len(steps)
            if step is steps[-1]:
                line |= last
            self.recorder.record(line)
        position.bytes_sent += agreed.bytes_sent
        position.bytes_dense += agreed.bytes_dense
        if self._groups is not None and self._groups.rank != 0 and position.step % _DRAIN_EVERY_STEPS < len(steps):
            self.recorder.drain(0.0)  # the lines stay in the recorder's history, in case rank 0 is lost

    def line(self, step: int, epoch: int, *, now_s: float | None = None, **values: Any) -> dict[str, Any]:
        """Return a metric line with these values."""
        now_s = time.time() if now_s is None else now_s
        return {"step": step, "epoch": epoch + 1, "time_s": round(now_s - self.started_at, 6), **values}
