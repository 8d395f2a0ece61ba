"""A worker that pulls parameters from servers and pushes gradients to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.platform.comm.channel.blocks import SharedBlock, room_for
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.data.shares import ShareReader
from orchestray.trainers.core.buffers_by_row import refuse_by_row
from orchestray.trainers.core.faults import Faults
from orchestray.trainers.core.model_state import buffers_beside
from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.loop.saving import refuse_own_saving
from orchestray.trainers.parallel.assemble import Assembler
from orchestray.trainers.ps.protocol.assignments import Compute, Deposit, Order, Save, Validate
from orchestray.trainers.ps.protocol.factors import FactoredGradient, capture_of
from orchestray.trainers.ps.protocol.partition import FlatModel, Partition, trainable
from orchestray.trainers.ps.protocol.residuals import (
    Kept,
    deposit,
    hand_over,
    kept_by,
    lost_text,
    take_up,
    to_file,
)
from orchestray.trainers.ps.protocol.row_sparse import RowSparseGradient
from orchestray.trainers.ps.protocol.settings import CentralSettings, alone
from orchestray.trainers.ps.protocol.state import load_values, whole_slots
from orchestray.trainers.ps.server.shard import Rates
from orchestray.trainers.ps.worker.client import ShardClient
from orchestray.trainers.ps.worker.in_place_writes import InPlaceWrites
from orchestray.trainers.ps.worker.local_steps import LocalSteps
from orchestray.trainers.ps.worker.order_loop import OrderLoop
from orchestray.trainers.ps.worker.pushing import Computed, Pusher, PushesEach, PushesLater
from orchestray.trainers.ps.worker.watch import ShareTakenError, Watch, check_in_passes

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.base import Channel
    from orchestray.platform.data.source import Source
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings

_LARGE_BYTES = 64 * 1024
"""Mean bytes of a parameter from which on views of other memory are cheaper than copying."""


class CentralWorker(OrderLoop):
    """A worker with a copy of the whole model."""

    def __init__(
        self,
        task: Task,
        settings: ReplicaSettings,
        stream_of: Callable[[str, int, int], SampleStream],
        source: Source,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """Take the same arguments as `OrderLoop`, and the device of the model."""
        super().__init__(task, settings, stream_of, source)
        self.central = CentralSettings.of(settings)
        own = alone(settings)
        self._assembler = Assembler(task, own, lambda split, _rank: stream_of(split, 0, 1), torch.device(device))
        refuse_own_saving(self._assembler.plain_model, settings)
        refuse_by_row(self._assembler.plain_model, "strategy.exchange.type: parameter_server")
        groups = Groups(own.layout, SoloCollective())
        self._prepare(self._assembler.plain_model)
        self._assembled(self._assembler.assemble(lambda: groups))
        self.flat = FlatModel(self.network.model)
        self.partition = Partition.of(self.network.model, self.central.shards, unit=self.central.unit)
        self._fixed_buffers = self._places
        last_step = self.central.coordinator_settings(settings, source.num_rows, 0, {}).last_step
        self._rates = Rates(settings.optimizer["lr"], settings.lr_schedule, last_step)
        whole = Partition.of(self.network.model).slices(0)
        steps = LocalSteps(whole, self._rates, settings.optimizer, settings.grad_clip)
        self.local_steps = steps if self.central.decouples_rates else None
        """Makes steps of the worker's own, where workers push changes instead of gradients; else None."""
        self.factors = capture_of(self.network.model, self.central.factors)
        """Inputs and errors of fully connected layers, which are sent instead of gradients; None: they are not."""
        self._writes = InPlaceWrites(trainable(self.network.model))
        self._waited_s, self._bytes_saved = 0.0, 0
        """Totals of the clients of earlier runs."""
        self._kept: tuple[int, Kept | None] = (-1, None)
        """Number of this worker in the last run, and the state of its compressors then."""
        self._block: SharedBlock | None = None
        self._pusher: Pusher = PushesEach(self)
        self._num_cancelled = 0
        """Number of shares given up because another worker had finished them."""
        if self.central.backup_workers:
            check_in_passes(self.network.model, self._check_watch)

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for servers."""
        return self._waited_s + (0.0 if self._client is None else self._client.waited_s)

    @property
    def bytes_saved(self) -> int:
        """Number of bytes saved by compressing gradients."""
        return self._bytes_saved + (0 if self._client is None else self._client.encoder.bytes_saved)

    def part(self) -> None:
        """Drop the connection of the last run, but keep its counts and its compressors' state."""
        if self._client is not None:
            self._kept = self._client.worker, kept_by(self._client)
        self._waited_s, self._bytes_saved, self._client = self.waited_s, self.bytes_saved, None

    def run(
        self,
        channels: Sequence[Channel],
        rank: int,
        *,
        writer: CheckpointWriter | None = None,
        faults: Faults | None = None,
        replace: Callable[[int, Exception], Channel] | None = None,
    ) -> str:
        """Do what is ordered until there is nothing more to do.

        Args:
            channels: channels to the shards, in their order.
            rank: rank of this worker.
            writer: writes the checkpoints that this worker is ordered to save.
            faults: faults that happen here on purpose.
            replace: see `ShardClient`.

        Returns:
            The reason of the end: `finished`, `left`, or what stopped the run.

        Raises:
            ChannelClosedError: a server is lost, and no other replaces it.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        self._faults = faults or Faults()
        self._block = self._make_block(channels)
        if self.central.push_every == 1:  # a gradient that is still being sent is in other memory
            self.flat.make_gradients_at_home(self.network.model)
        self._client = ShardClient(
            channels,
            self.partition,
            rank,
            self.flat.values,
            buffers=self._buffers,
            compressors=self._compressors(rank, self.central.shards),
            replace=replace,
            block=self._block,
            pulls_changes=self.central.pulls_changes and not self._writes.written,
        )
        self.client.hello(data=self.marks())
        self._take_up(rank)
        self.client.pull()  # the model's initial or earlier parameters may not be those of the run
        self.pulled()
        self._pusher = PushesEach(self) if self._pushes_each else PushesLater(self)
        return self._work(writer)

    def counts(self) -> dict[str, float]:
        cancelled = {"cancelled": self._num_cancelled} if self.central.backup_workers else {}
        return {**super().counts(), **cancelled}

    def fetch(self, step: int) -> dict[str, Tensor]:
        """Return the plain model's tensors after `step`, from the servers."""
        self.pull(step if self._by_batch else 0)
        return model_tensors(self.network.model)

    def pull(self, min_version: int) -> None:
        """Pull the servers' parameters into the model.

        Args:
            min_version: number of steps whose updates they must hold.
        """
        self.client.pull(min_version, only_newer=not self._by_batch)
        self.pulled()

    def pulled(self) -> None:
        """Use the parameters and buffers that have just been pulled."""
        self.flat.look_at(self.client.values)
        if self._buffers is not None:
            self._buffers.write_to(self._places)

    def shorter(self, total: Tensor | None = None) -> RowSparseGradient | FactoredGradient | None:
        """Return a gradient with factors, or without the rows that sparse gradients lack, or None.

        None: it would not be shorter, or it is sent compressed or as a change.

        Args:
            total: sum of gradients, `[elements]`; default: the gradient of the share just computed.
        """
        if self.client.encoder.compressors is not None or self.local_steps is not None:
            return None
        if self.factors is not None and total is None:
            return self.factors.gradient(self.flat.gradients)
        return self.flat.runs(total)

    def contribution(self, computed: Computed) -> Tensor:
        """Return what is pushed for the share just computed, `[elements]`: its gradient, or a local step's change."""
        if self.local_steps is None:
            return self.flat.gradient
        return self.local_steps.change(computed.order, self.flat.gradient, self.flat.values, computed.unused)

    def step_locally(self, gradient: Tensor, step: int) -> None:
        """Move this worker's own parameters until it fetches the servers' (algorithm 1 of the paper)."""
        with torch.no_grad():
            self.flat.values.add_(gradient, alpha=-self._rates.at(step))

    def take(self, like: Tensor) -> Tensor:
        """Return memory of the dtype and shape of a tensor, for pushes that need no copy to be sent."""
        return torch.empty_like(like) if self._block is None else self._block.take(like)

    def _make_block(self, channels: Sequence[Channel]) -> SharedBlock | None:
        """Create memory that servers of this machine see, with the parameters in it and room for pushes.

        Return None without such a server.
        """
        if self.flat.values.device.type != "cpu" or not any(channel.lends for channel in channels):
            return None
        buffers = [] if self._buffers is None else [self._buffers.floats, self._buffers.integers]
        num_pushed = 1 if self._pushes_each else 2 if self.central.push_every == 1 else 3
        block = SharedBlock.create(room_for([self.flat.values] * (1 + num_pushed) + buffers))
        self.flat.live_in(block.take)
        if self._buffers is not None:
            self._buffers.floats = block.take(self._buffers.floats)
            self._buffers.integers = block.take(self._buffers.integers)
        return block

    def _only_reads_parameters(self) -> bool:
        """Return True if the parameters may stay in the memory of a server on this machine.

        The worker must not change them, and they must be large enough to make it worthwhile.
        """
        central, named = self.central, trainable(self.network.model)
        if self._by_batch or central.fetch_every > 1 or central.decouples_rates:
            return False
        if central.pulls_changes or self._writes.written:
            return False
        return self.flat.values.numel() * self.flat.values.element_size() >= _LARGE_BYTES * len(named)

    @property
    def _pushes_each(self) -> bool:
        central = self.central
        return central.push_every == 1 and central.fetch_every == 1 and not central.overlap

    def _take_up(self, rank: int) -> None:
        """Continue with the state of this worker's compressors."""
        kept = self._kept[1] if self._kept[0] == rank else None
        if self.central.keeps_residuals(self.settings):
            if take_up(self.client, kept):
                self.client.warn(lost_text(rank))
        elif kept is not None and self.settings.has_residual:
            self.client.warn(
                f"worker {rank} lost touch with its leaf server, and begins again without what its compression had not "
                "sent yet of its gradients; strategy.exchange.groups: 1 without compute_groups keeps that."
            )

    # -- orders ------------------------------------------------------------------------------------------------------

    def _next(self) -> Order:
        return self.client.next()

    def _compute(self, order: Compute, reader: ShareReader) -> list[Order]:
        if min(self.client.versions) < order.min_version or self._pusher.wants_parameters:
            self.pull(order.min_version)
            self._pusher.wants_parameters = False
        try:
            computed = self._gradient(order, reader)
        except ShareTakenError:
            self._undo(order)
            return []
        finally:
            self._watch = None
        return self._pusher.push(computed)

    def _check_watch(self) -> None:
        if self._watch is not None:
            self._watch.check()

    def _undo(self, order: Compute) -> None:
        """Leave no trace of a share that was cancelled midway."""
        self._look_for_writes()
        if self._buffers is not None:
            self._buffers.write_to(self._places)
        self.client.give_up(order)
        self._num_cancelled += 1

    def _settle(self) -> list[Order]:
        return self._pusher.settle()

    def _leave(self) -> None:
        hand_over(self.client)

    def _deposit(self, order: Deposit) -> None:
        deposit(self.client)
        self.client.deposited(order)

    def _gradient(self, order: Compute, reader: ShareReader) -> Computed:
        """Compute the order's gradient into the flat gradient."""
        began_s = time.perf_counter()
        share = reader.read(order)
        if self.central.backup_workers and self._pushes_each:
            self._watch = Watch(self.client.watch(order))
        self.flat.begin()
        if self.factors is not None:
            self.factors.begin()
        self._writes.begin(self.flat.values)
        loss_sum = self._backward(order, share, self._assembler.draw)
        self._look_for_writes()
        self._count(order, time.perf_counter() - began_s)
        unused, measured = self.flat.unused(), self._measured(self.partition)
        return Computed(order, loss_sum, unused, self._buffer_push(order), measured, list(self.client.versions))

    def _look_for_writes(self) -> None:
        """Leave the parameters in the server's memory as long as the model is known not to write to them."""
        new = self._writes.end(self.flat.values)
        self.client.stays_there = self._block is not None and self._only_reads_parameters()
        self.flat.look_at(self.client.values)
        if new:
            self.client.pulls_changes = False
            names = ", ".join(repr(name) for name in new[:3]) + (", ..." if len(new) > 3 else "")
            self.client.warn(
                f"the model writes to its parameters ({names}) when it is used. Parameter servers get gradients alone, "
                "so what it writes is lost when a worker fetches parameters; use strategy.network.data: 1 with "
                "strategy.exchange.type: allreduce, or have the model compute with a changed copy."
            )

    def _validate(self, order: Validate) -> None:
        self.pull(order.step if self._by_batch else 0)
        self.client.validated(order, self._evaluate(order, self._assembler.draw))

    def _save(self, order: Save, writer: CheckpointWriter | None) -> None:
        """Write what all servers hold to a checkpoint; no push is in progress while they are read."""
        snapshots = self.client.snapshot(order.step if self._by_batch else None)
        if writer is not None:
            self.flat.look_at(self.client.home)
            tensors = load_values(self.network.model, self.flat.values, snapshots)
            slots, beside = whole_slots(self.partition, snapshots), buffers_beside(self.network.model)
            self._write(writer, order, tensors, slots, kept=to_file(snapshots), beside=beside)
        self.client.saved(order)
