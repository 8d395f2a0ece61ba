"""The book-keeping of a replica's steps: metric lines, bytes, time, staleness."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

from torch import Tensor

from orchestray.trainers.core.unread import Arriving

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestray.platform.data.order import Indices
    from orchestray.platform.data.stream import Share
    from orchestray.platform.process.wait_clock import Waiting
    from orchestray.platform.run.recorder import Recorder
    from orchestray.trainers.core.exchange import Exchange
    from orchestray.trainers.core.network import Network, Usage
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.loop.device_metrics import DeviceMetrics
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
    num_passes: int = 0
    """Micro-batches of this worker's share, each of which is a pass forward and backward."""
    sample_ids: list[Indices] = field(default_factory=list)
    """Numbers of these samples in the dataset, a micro-batch each."""
    loss: float | Tensor = 0.0
    """This worker's part of the batch's mean loss; a tensor if it is on a device and not read yet."""
    done_s: float = 0.0
    staleness: list[int] | None = None
    """Staleness of each update, where updates may be stale."""
    sums: list[float] = field(default_factory=list)
    """Loss, stop requests and workers past the time limit, summed along with the gradients."""
    metrics: dict[str, float | Tensor] = field(default_factory=dict)
    """Entries of optimizer and scheme for the metric line; tensors are on a device and not read yet."""


@dataclass(frozen=True)
class Agreed:
    """The sums of all workers' reports on some steps; the same on each worker."""

    losses: list[float] | list[float | Tensor]
    """Mean loss of each step; a tensor is not read yet."""
    stop: float = 0.0
    """Number of workers that were asked to stop."""
    late: float = 0.0
    """Number of workers on which the time limit has passed."""
    bytes_sent: int = 0
    bytes_dense: int = 0
    """Bytes that would have been sent without compression."""


@dataclass(frozen=True)
class _Late:
    """A metric line of which some values are on their way from a device."""

    line: dict[str, Any]
    step: Step
    names: list[str]
    """Keys whose values arrive."""
    arriving: Arriving | None
    """None if all its values are known."""
    network: Network

    @staticmethod
    def of(line: dict[str, Any], step: Step, network: Network) -> _Late:
        unread = {name: value for name, value in line.items() if isinstance(value, Tensor)}
        return _Late(line, step, [*unread], Arriving([*unread.values()]) if unread else None, network)


class UsageSum:
    """The sums of a worker's time and traffic over the steps of one generation of the gang."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._busy_s = self._span_s = self._worked_s = self._waited_s = self._starved_s = 0.0
        self._bytes_by_link: Counter[str] = Counter()
        self._timeline: list[dict[str, Any]] = []
        self._num_shares = self._num_samples = self._num_passes = 0
        self._order = 0
        """CRC-32 of the numbers of all samples, in the order in which this worker took them."""

    def add(self, steps: Sequence[Step], usage: Usage | None) -> dict[str, float]:
        """Add steps and what their network used; return `bubble`, for the metric line, if there is a schedule."""
        self._num_shares += len(steps)
        self._num_samples += sum([step.num_samples for step in steps])
        self._num_passes += sum([step.num_passes for step in steps])
        for step in steps:
            for ids in step.sample_ids:
                self._order = crc32(ids.tobytes(), self._order)
        if usage is None:
            return {}
        self._busy_s += usage.busy_s
        self._span_s += usage.span_s
        self._bytes_by_link.update(usage.bytes_by_link)
        self._timeline = usage.timeline or self._timeline
        return {"bubble": round(max(0.0, 1.0 - usage.busy_s / usage.span_s), 6)} if usage.span_s > 0 else {}

    @contextlib.contextmanager
    def training(self, waiting: Waiting) -> Iterator[None]:
        """Count the time inside as training, except for what this worker spends waiting for others or for samples."""
        began_s, waited_before_s, starved_before_s = time.perf_counter(), waiting.total_s, self._starved_s
        yield
        waited_s = waiting.total_s - waited_before_s
        self._waited_s += waited_s
        self._worked_s += time.perf_counter() - began_s - waited_s - (self._starved_s - starved_before_s)

    def awaited(self, shares: Iterator[Share]) -> Iterator[Share]:
        """Yield shares, and count the seconds in which the next one was not there; for use inside of `training`."""
        while True:
            began_s = time.perf_counter()
            share = next(shares, None)
            self._starved_s += time.perf_counter() - began_s
            if share is None:
                return
            yield share

    def summary(self) -> dict[str, Any]:
        """Return all sums as JSON values."""
        return {
            "rank": self._rank,
            "busy_s": round(self._busy_s, 6),
            "span_s": round(self._span_s, 6),
            "bytes_by_link": dict(self._bytes_by_link),
            "timeline": self._timeline,
            "worker": {
                "shares": self._num_shares,
                "samples": self._num_samples,
                "passes": self._num_passes,
                "order": self._order,
                "busy_s": round(self._worked_s, 6),
                "waited_s": round(self._waited_s, 6),
                "starved_s": round(self._starved_s, 6),
            },
        }


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
        self.device: DeviceMetrics | None = None
        """Entries of the lines about the device; None: there are none."""
        self._exchange = exchange
        self._groups: Groups | None = None
        self._reported_bytes = self._bytes_before = self._saved_before = 0
        self.is_on_device = False
        """True if values of lines may be on a device, and not read yet."""
        self._late: list[_Late] = []
        """Lines of the last steps, complete but for values on a device: reading those at once would stop it."""

    def begin(self, groups: Groups) -> None:
        """Start to count after connecting: bytes sent before are not part of the training."""
        self._groups = groups
        self.usage = UsageSum(groups.rank)
        self._reported_bytes = self._sent_bytes

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count time and bytes inside the context as those of steps."""
        assert self._groups is not None
        self._bytes_before = self._groups.bytes_sent
        self._saved_before = self._exchange.bytes_saved
        with self.usage.training(self._groups.waiting):
            yield

    # -- bytes ---------------------------------------------------------------------------------------------------------

    @property
    def _sent_bytes(self) -> int:
        """Bytes that this worker sent, or that a peer sent at its request and only this worker can count."""
        assert self._groups is not None
        return self._groups.bytes_sent + self._exchange.asked_bytes

    def unreported_bytes(self) -> int:
        """Return the bytes sent since the last call."""
        sent = self._sent_bytes
        unreported, self._reported_bytes = sent - self._reported_bytes, sent
        return unreported

    def saved_bytes(self) -> int:
        """Return the bytes that this worker's compression has saved in the steps of this `training`."""
        return self._exchange.bytes_saved - self._saved_before

    def bytes_of_all(self, num_workers: int) -> tuple[int, int]:
        """Return the bytes that all workers sent in the steps of this `training`, and those without compression.

        Valid where all workers hold whole models and are in step: then they send equally many, or know the difference.
        """
        assert self._groups is not None
        sent = (self._groups.bytes_sent - self._bytes_before) * num_workers + self._exchange.bytes_beyond
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
        """Record steps on which all workers have agreed; those with values on a device when the next ones come.

        Args:
            steps: the steps, in order.
            agreed: sums over all workers.
            network: network that was trained.
            position: position in the run, which moves on.

        Raises:
            TrainingError: the loss of the steps before, which is read only now, is not finite.
        """
        if self._late:
            self.settle(position)
        last = self.usage.add(steps, network.usage())
        for step, loss in zip(steps, agreed.losses, strict=True):
            known = None if isinstance(loss, Tensor) else loss
            position.complete(step.number, step.epoch, step.batch_samples, known)
            line = self.line(step.number, step.epoch, now_s=step.done_s, loss=loss, lr=step.lr)
            line["samples_per_s"] = step.batch_samples / max(step.done_s - step.began_s, 1e-9)
            line |= step.metrics
            if self.device is not None:
                line |= self.device.of_step(step.batch_samples, step.done_s)
            if step.staleness is not None:
                line["staleness"] = max(step.staleness, default=0)
                self.staleness.update(step.staleness)
            line["bytes_sent"] = agreed.bytes_sent // len(steps)
            if step is steps[-1]:
                line |= last
            if self.is_on_device:
                self._late.append(_Late.of(line, step, network))
            else:
                self.recorder.record(line)
        position.bytes_sent += agreed.bytes_sent
        position.bytes_dense += agreed.bytes_dense
        if self._groups is not None and self._groups.rank != 0 and position.step % _DRAIN_EVERY_STEPS < len(steps):
            self.recorder.drain(0.0)  # the lines stay in the recorder's history, in case rank 0 is lost

    def settle(self, position: Position) -> None:
        """Read what the last steps have left on a device, and record their lines.

        Called before a checkpoint and a validation, and at the end: they need the loss, and that it is finite.

        Args:
            position: position in the run, which gets the losses.

        Raises:
            TrainingError: a loss is not finite.
        """
        late, self._late = self._late, []
        for each in late:
            if each.arriving is not None:
                each.line.update(zip(each.names, each.arriving.read(), strict=True))
            if "loss" in each.names:
                if not math.isfinite(each.line["loss"]):
                    each.network.refuse_losses(each.step.number)
                position.add_loss(each.step.epoch, each.step.batch_samples, each.line["loss"])
            self.recorder.record(each.line)

    def line(self, step: int, epoch: int, *, now_s: float | None = None, **values: Any) -> dict[str, Any]:
        """Return a metric line with these values."""
        now_s = time.time() if now_s is None else now_s
        return {"step": step, "epoch": epoch + 1, "time_s": round(now_s - self.started_at, 6), **values}
