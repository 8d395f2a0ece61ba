"""The loop of every worker under parameter servers: an order arrives, and is carried out. Imports no Ray.

Downpour SGD: Dean et al., "Large Scale Distributed Deep Networks" (2012), section 4.1 and algorithm 1. The coordinator
on the lead server decides how far a worker may run ahead of the others. How a worker reaches the parameters is a
subclass's: it pulls and pushes them, changes them in shared memory, or holds a part of them among other workers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.errors import TrainingError
from orchestray.platform.task import training_batch_of
from orchestray.trainers.core.buffers import untouched
from orchestray.trainers.core.faults import Faults
from orchestray.trainers.core.modes import evaluating
from orchestray.trainers.core.task_calls import add
from orchestray.trainers.loop.batch_loss import why_no_mean
from orchestray.trainers.loop.error_feedback import RESIDUALS
from orchestray.trainers.loop.fitting_optimizer import make_fitting
from orchestray.trainers.optim.factory import measures_layers
from orchestray.trainers.ps.protocol.assignments import LEFT, Compute, Deposit, Finish, Order, Save, Validate
from orchestray.trainers.ps.protocol.buffers import BufferPlaces, BufferPush, Buffers
from orchestray.trainers.ps.protocol.encoding import compressor_of
from orchestray.trainers.ps.protocol.residuals import cut_of
from orchestray.trainers.ps.worker.watch import Watch
from orchestray.trainers.sync.allreduce.allreduce import AllReduce

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.source import Source
    from orchestray.platform.data.stream import SampleStream, Share
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.task import Task
    from orchestray.trainers.compression.base import Compressor
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.core.rng import RngKey
    from orchestray.trainers.optim.optimizers import Optimizer
    from orchestray.trainers.ps.protocol.partition import Partition
    from orchestray.trainers.ps.worker.client import ShardClient


class OrderLoop(ABC):
    """A worker that computes what the lead server orders, on its own copy of the model, or its part of one.

    Attributes:
        settings: settings of the run.
        network: this worker's part of the network.
        num_shares: number of shares computed.
        num_samples: number of samples computed.
        busy_s: seconds spent computing them.
    """

    network: Network
    _places: BufferPlaces

    def __init__(
        self, task: Task, settings: ReplicaSettings, stream_of: Callable[[str, int, int], SampleStream], source: Source
    ) -> None:
        """
        Args:
            task: task to learn.
            settings: settings of the run; the same on every worker and server.
            stream_of: returns the samples of a split as part i of n sees them.
            source: training samples.
        """
        self.settings = settings
        self.num_shares, self.num_samples, self.busy_s = 0, 0, 0.0
        self._stream_of, self._source, self._task = stream_of, source, task
        chosen = settings.exchange
        is_decoupled = chosen.get("rates", "coupled") == "decoupled"
        self._by_batch = chosen.get("consistency", "asynchronous") != "asynchronous" and not is_decoupled
        """True if versions of the parameters count batches; False if they count pushes."""
        self._exchange = AllReduce()  # of a single worker: a network needs an exchange
        self._faults = Faults()
        self._client: ShardClient | None = None
        self._watch: Watch | None = None
        """Watch over the share being computed; None: no other worker computes it."""
        self._buffers: Buffers | None = None
        """Buffers as they were last pulled; None: the model has none."""
        self._measuring: Optimizer | None = None
        """Optimizer that measures here what the servers' one steps by; None: there is nothing to measure."""
        self._fixed_buffers: BufferPlaces | None = None
        """Places of the buffers, which must keep their sizes; None: they are not looked at."""

    def _prepare(self, model: nn.Module) -> None:
        """Look at the plain model, before it is assembled."""
        if measures_layers(self.settings.optimizer):
            self._measuring = make_fitting(self.settings.optimizer, model)

    def _assembled(self, network: Network, tensor_group: Collective | None = None) -> None:
        """Use a network, whose layers are split over the workers of a group, if there is one."""
        self.network = network
        self._exchange.attach(network.model, SoloCollective())
        self._places = BufferPlaces(network.model)
        held = Buffers.of(self._places)
        self._buffers = held if held.floats.numel() or held.integers.numel() else None
        if self._measuring is not None:
            self._measuring.observe(network.model, network.pieces, tensor_group, network.partial)

    def marks(self) -> dict[str, list[int]]:
        """Return the marks of this worker's data by split (`mark_of`)."""
        return {split: self._stream_of(split, 0, 1).mark() for split in ("train", "validation")}

    @property
    def client(self) -> ShardClient:
        """The connection to the servers."""
        assert self._client is not None
        return self._client

    def _work(self, writer: CheckpointWriter | None) -> str:
        """Do what is ordered until there is nothing more to do; return the reason of the end.

        Args:
            writer: writes the checkpoints that this worker is ordered to save.
        """
        todo: deque[Order] = deque()
        task, settings = self._task, self.settings
        with ShareReader(
            self._source,
            task.to_batch,
            to_training_batch=training_batch_of(task),
            seed=settings.seed,
            cuts_first=settings.loss_is == "mean",
        ) as reader:
            while True:
                order = todo.popleft() if todo else self._next()
                if isinstance(order, Compute):
                    todo += self._compute(order, reader)
                    continue
                # For all other orders, none of this worker's pushes may be in progress.
                todo += self._settle()
                if isinstance(order, Finish):
                    if order.reason == LEFT:
                        self._leave()
                    return order.reason
                if isinstance(order, Validate):
                    self._validate(order)
                elif isinstance(order, Deposit):
                    self._deposit(order)
                elif isinstance(order, Save):
                    self._save(order, writer)

    @abstractmethod
    def _next(self) -> Order:
        """Return the next order, once there is one."""

    @abstractmethod
    def _compute(self, order: Compute, reader: ShareReader) -> list[Order]:
        """Compute a share's gradient, and apply or push it; return the orders that came with an answer."""

    def _settle(self) -> list[Order]:
        """Wait until nothing is being pushed; return the orders that came with the answers."""
        return []

    def _leave(self) -> None:
        """Hand over what only this worker has, as it leaves the run."""
        return

    @abstractmethod
    def _validate(self, order: Validate) -> None:
        """Validate the present parameters on a part of the samples."""

    def _deposit(self, order: Deposit) -> None:
        """Give the servers a copy of what only this worker has."""
        return

    @abstractmethod
    def _save(self, order: Save, writer: CheckpointWriter | None) -> None:
        """Write a checkpoint; nothing is being pushed meanwhile."""

    # -- parts of these ------------------------------------------------------------------------------------------------

    def _backward(self, order: Compute, share: Share, draw: RngKey) -> float:
        """Run forward and backward of a share; return its part of the batch's mean loss."""
        draw.step, draw.replica = order.step, order.share
        if self._measuring is not None:
            self._measuring.begin_step(order.step, order.num_samples, order.batch_samples)
        is_cut = share.num_micro_batches > 1 or share.num_samples < share.batch_samples
        if share.cut and is_cut:
            model = self.network.model
            with evaluating(model), untouched(model, self._task), torch.no_grad(), self._weights_at_rest():
                problem, changes = why_no_mean(self.network, share, self.settings)
            if problem is not None and not changes:
                raise TrainingError(problem)
        sleep = None if self._watch is None else self._watch.sleep
        with self._faults.during(order.step, self.network.model, sleep=sleep):
            loss_sum = float(self.network.backward(share, self._exchange, step=order.step))
            if not math.isfinite(loss_sum):
                self.network.refuse_losses(order.step)
            self._combine()
        if self._fixed_buffers is not None:
            self._fixed_buffers.check(self.network.model)
        return loss_sum

    def _weights_at_rest(self) -> AbstractContextManager[None]:
        """Return a context in which nobody else changes the model's parameters."""
        return nullcontext()

    def _combine(self) -> None:
        """Sum gradients of which several workers have a part."""
        return

    def _count(self, order: Compute, busy_s: float) -> None:
        """Count a share that took `busy_s` seconds."""
        self.busy_s += busy_s
        self.num_shares += 1
        self.num_samples += order.num_samples

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Seconds spent waiting for servers, and for other workers."""

    @property
    @abstractmethod
    def bytes_saved(self) -> int:
        """Number of bytes saved by compressing gradients."""

    def counts(self) -> dict[str, float]:
        """Return this worker's counters, by their names in the result."""
        return {
            "shares": self.num_shares,
            "samples": self.num_samples,
            "busy_s": self.busy_s,
            "waited_s": self.waited_s,
            "saved_bytes": self.bytes_saved,
        }

    def _buffer_push(self, order: Compute) -> BufferPush | None:
        """Return the change that a share has made to the model's buffers, which is undone."""
        if self._buffers is None:
            return None
        change = self._buffers.change_of(self._places, order.num_samples / order.batch_samples)
        self._buffers.write_to(self._places)
        return change

    def _measured(self, partition: Partition) -> list[Tensor]:
        """Return what the passes of a share have measured for the optimizer of each shard; nothing if none measures."""
        if self._measuring is None:
            return []
        self._measuring.combine_measurements()
        held = [{piece.name for piece in partition.slices(shard)} for shard in range(partition.num_shards)]
        return [self._measuring.measurements(names) for names in held]

    def _write(
        self,
        writer: CheckpointWriter,
        order: Save,
        tensors: Mapping[str, Tensor],
        slots: Mapping[str, Tensor],
        *,
        kept: Mapping[str, Tensor],
        beside: Mapping[str, Tensor],
    ) -> None:
        """Write a checkpoint with the lead's state of the run, and the state `kept` of all workers' compressors."""
        state = {**self.client.run_state, RESIDUALS: cut_of(self.settings)} if kept else self.client.run_state
        writer.save_async(order.step, tensors, slots, state, exchange=kept or None, resume=beside)
        writer.wait()

    def _evaluate(self, order: Validate, draw: RngKey) -> dict[str, float]:
        """Return loss and metrics, summed over the order's part of the validation samples."""
        draw.step = order.step
        sums: dict[str, float] = {}
        stream = self._stream_of("validation", order.part, order.num_parts)
        with evaluating(self.network.model), torch.no_grad(), stream.epoch(0) as shares:
            for share in shares:
                add(sums, self.network.evaluate(share))
        return sums

    def _compressors(self, worker: int, num_shards: int) -> list[Compressor] | None:
        """Return a compressor of gradients for each shard; None without compression."""
        made = [compressor_of(self.settings, worker) for _ in range(num_shards)]
        return [one for one in made if one is not None] or None
