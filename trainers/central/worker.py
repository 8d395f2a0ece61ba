"""The loop of a worker under parameter servers: an order, parameters, a gradient, a push. Imports no Ray.

Downpour SGD: Dean et al., "Large Scale Distributed Deep Networks" (2012), section 4.1 and algorithm 1; how far a worker
may run ahead of the others is decided by the ledger on the lead server.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.platform.channel.blocks import SharedBlock, room_for
from orchestray.platform.collective import SoloCollective
from orchestray.platform.data.shares import ShareReader
from orchestray.trainers.central.buffers import BufferPlaces, BufferPush, Buffers
from orchestray.trainers.central.client import ShardClient
from orchestray.trainers.central.local_steps import LocalSteps
from orchestray.trainers.central.orders import LEFT, Compute, Deposit, Finish, Order, Save, Validate
from orchestray.trainers.central.partition import FlatModel, Partition, trainable
from orchestray.trainers.central.pushing import Computed, Pusher, PushesEach, PushesLater
from orchestray.trainers.central.residuals import Kept, cut_of, deposit, hand_over, kept_by, lost_text, take_up, to_file
from orchestray.trainers.central.runs import Runs
from orchestray.trainers.central.settings import CentralSettings, alone
from orchestray.trainers.central.shard import Rates
from orchestray.trainers.central.state import load_values, whole_slots
from orchestray.trainers.central.written import WriteWatch
from orchestray.trainers.compression import make_compressor
from orchestray.trainers.exchange.allreduce import AllReduce
from orchestray.trainers.faults import Faults
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.network.assemble import Assembler
from orchestray.trainers.replica.residue import RESIDUALS
from orchestray.trainers.weights import model_tensors

if TYPE_CHECKING:
    from orchestray.platform.channel.base import Channel
    from orchestray.platform.data.source import Source
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.task import Task
    from orchestray.trainers.compression.base import Compressor
    from orchestray.trainers.replica.settings import ReplicaSettings

_LARGE_BYTES = 64 * 1024
"""Of a parameter, in the mean: looking at other memory takes as long as copying about so much."""


class CentralWorker:
    """Computes what the lead server orders, on a copy of the model of its own."""

    def __init__(
        self,
        task: Task,
        settings: ReplicaSettings,
        stream_of: Callable[[str, int, int], SampleStream],
        source: Source,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            task: what is learned.
            settings: how; the same on every worker and server.
            stream_of: the samples of a split as part i of n sees them.
            source: the training samples.
            device: where the model lives.
        """
        self.settings = settings
        self.central = CentralSettings.of(settings)
        self.busy_s = 0.0
        """Seconds spent computing."""
        self.num_shares = self.num_samples = 0
        """Computed."""
        self._stream_of = stream_of
        self._source, self._to_batch = source, task.to_batch
        own = alone(settings)
        self._assembler = Assembler(task, own, lambda split, _rank: stream_of(split, 0, 1), torch.device(device))
        groups = Groups(own.layout, SoloCollective())
        self.network = self._assembler.assemble(lambda: groups)
        self.flat = FlatModel(self.network.model)
        self.partition = Partition.of(self.network.model, self.central.shards)
        self._places = BufferPlaces(self.network.model)
        held = Buffers.of(self._places)
        self._buffers = held if held.floats.numel() or held.integers.numel() else None
        self._exchange = AllReduce()  # of one: all it does is what a network asks of an exchange
        self._exchange.attach(self.network.model, SoloCollective())
        last_step = self.central.ledger(settings, source.num_rows, 0, 0).last_step
        self._rates = Rates(settings.optimizer["lr"], settings.lr_schedule, last_step)
        whole = Partition.of(self.network.model).slices(0)
        steps = LocalSteps(whole, self._rates, settings.optimizer, settings.grad_clip)
        self.local_steps = steps if self.central.decouples_rates else None
        """Where workers push how far they have come, not gradients."""
        self._by_batch = self.central.consistency != "asynchronous"
        self._writes = WriteWatch(trainable(self.network.model))
        self._client: ShardClient | None = None
        self._waited_s, self._bytes_saved = 0.0, 0
        """With the clients of earlier runs."""
        self._kept: tuple[int, Kept | None] = (-1, None)
        """Which worker this was in the last run, and what its compressors kept."""
        self._block: SharedBlock | None = None
        self._faults = Faults()

    @property
    def client(self) -> ShardClient:
        """The connection to the servers."""
        assert self._client is not None
        return self._client

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for servers."""
        return self._waited_s + (0.0 if self._client is None else self._client.waited_s)

    @property
    def bytes_saved(self) -> int:
        """By compressing gradients."""
        return self._bytes_saved + (0 if self._client is None else self._client.encoder.bytes_saved)

    def part(self) -> None:
        """Let go of the connection of the last run; what it counted is kept, and what its compressors keep."""
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
        """Do what is ordered until there is nothing more to do; returns why: `finished`, or what stopped the run.

        Args:
            channels: to the shards, in their order.
            rank: of this worker.
            writer: writes the checkpoints that this worker is told to save.
            faults: what goes wrong here on purpose.
            replace: see `ShardClient`.

        Raises:
            ChannelClosedError: a server is lost, and nobody takes its place.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        self._faults = faults or Faults()
        self._block = self._make_block(channels)
        if self.central.push_every == 1:  # what is on its way while the next gradient is made lies elsewhere
            self.flat.make_gradients_at_home(self.network.model)
        self._client = ShardClient(
            channels,
            self.partition,
            rank,
            self.flat.values,
            buffers=self._buffers,
            compressors=self._compressors(rank),
            replace=replace,
            block=self._block,
        )
        self.client.hello()
        self._take_up(rank)
        self.client.pull()  # what this worker was built with, or had before, need not be where the run is
        self.pulled()
        pusher = self._pusher()
        with ShareReader(self._source, self._to_batch, seed=self.settings.seed) as reader:
            todo: deque[Order] = deque()
            while True:
                order = todo.popleft() if todo else self.client.next()
                if isinstance(order, Compute):
                    if min(self.client.versions) < order.min_version or pusher.wants_parameters:
                        self.pull(order.min_version)
                        pusher.wants_parameters = False
                    todo += pusher.push(self._compute(order, reader))
                    continue
                # Whatever else there is to do, nothing of this worker's may be under way.
                todo += pusher.settle()
                if isinstance(order, Finish):
                    if order.reason == LEFT:
                        hand_over(self.client)
                    return order.reason
                if isinstance(order, Validate):
                    self._validate(order)
                elif isinstance(order, Deposit):
                    deposit(self.client)
                    self.client.deposited(order)
                elif isinstance(order, Save):
                    self._save(order, writer)

    def fetch(self, step: int) -> dict[str, Tensor]:
        """The plain model's tensors after `step`, from the servers."""
        self.pull(step if self._by_batch else 0)
        return model_tensors(self.network.model)

    def pull(self, min_version: int) -> None:
        """The servers' parameters into the model."""
        self.client.pull(min_version, only_newer=not self._by_batch)
        self.pulled()

    def pulled(self) -> None:
        """Parameters have come in: so have the buffers."""
        self.flat.look_at(self.client.values)
        if self._buffers is not None:
            self._buffers.write_to(self._places)

    def shorter(self, total: Tensor | None = None) -> Runs | None:
        """The gradient of the share just computed, or a sum of such, without the rows that sparse ones leave out; None
        where it would not be shorter, or something else is to be sent of it.
        """
        if self.client.encoder.compressors is not None or self.local_steps is not None:
            return None
        return self.flat.runs(total)

    def contribution(self, computed: Computed) -> Tensor:
        """What is pushed of the share just computed, `[elements]`: its gradient, or how a step of its own moves."""
        if self.local_steps is None:
            return self.flat.gradient
        return self.local_steps.change(computed.order, self.flat.gradient, self.flat.values, computed.unused)

    def step_locally(self, gradient: Tensor, step: int) -> None:
        """Move this worker's own parameters until it fetches the servers' (algorithm 1 of the paper)."""
        with torch.no_grad():
            self.flat.values.add_(gradient, alpha=-self._rates.at(step))

    def take(self, like: Tensor) -> Tensor:
        """Memory of the dtype and shape of a tensor, for what is pushed: it need not be copied to be sent."""
        return torch.empty_like(like) if self._block is None else self._block.take(like)

    def _make_block(self, channels: Sequence[Channel]) -> SharedBlock | None:
        """Memory that servers of this machine see, with the parameters in it, and room for what is pushed; None: there
        is no such server.
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
        """Whether its parameters may be those that a server of this machine shows its workers: it changes them nowhere,
        and they are so large that it is worth the trouble.
        """
        central, named = self.central, trainable(self.network.model)
        if self._by_batch or central.fetch_every > 1 or central.decouples_rates:
            return False
        if self._writes.written:
            return False
        return self.flat.values.numel() * self.flat.values.element_size() >= _LARGE_BYTES * len(named)

    @property
    def _pushes_each(self) -> bool:
        central = self.central
        return central.push_every == 1 and central.fetch_every == 1 and not central.overlap

    def _pusher(self) -> Pusher:
        return PushesEach(self) if self._pushes_each else PushesLater(self)

    def _compressors(self, rank: int) -> list[Compressor] | None:
        compression, settings = self.settings.compression, self.settings
        if compression.get("type", "none") == "none":
            return None
        return [
            make_compressor(**compression, seed=settings.seed, worker=rank, num_workers=settings.layout.data)
            for _ in range(self.central.shards)
        ]

    def _take_up(self, rank: int) -> None:
        """Go on with what this worker's compressors kept."""
        kept = self._kept[1] if self._kept[0] == rank else None
        if self.central.keeps_residuals(self.settings):
            if take_up(self.client, kept):
                self.client.warn(lost_text(rank))
        elif kept is not None and self.settings.has_residue:
            self.client.warn(
                f"worker {rank} lost touch with its leaf server, and begins again without what its compression had not "
                "sent yet of its gradients; strategy.exchange.groups: 1 keeps that."
            )

    # -- orders ------------------------------------------------------------------------------------------------------

    def _compute(self, order: Compute, reader: ShareReader) -> Computed:
        """The order's gradient into the flat one."""
        began_s = time.perf_counter()
        draw = self._assembler.draw
        draw.step, draw.replica = order.step, order.share
        share = reader.read(order)
        self.flat.begin()
        self._writes.begin(self.flat.values)
        with self._faults.during(order.step, self.network.model):
            loss_sum = self.network.backward(share, self._exchange, step=order.step)
        self._look_for_writes()
        self.busy_s += time.perf_counter() - began_s
        self.num_shares += 1
        self.num_samples += order.num_samples
        return Computed(order, loss_sum, self.flat.unused(), self._buffer_push(order), list(self.client.versions))

    def _look_for_writes(self) -> None:
        """Look at a server's memory once it is known that the model leaves it alone; not any more once it does not."""
        new = self._writes.end(self.flat.values)
        self.client.stays_there = self._block is not None and self._only_reads_parameters()
        self.flat.look_at(self.client.values)
        if new:
            names = ", ".join(repr(name) for name in new[:3]) + (", ..." if len(new) > 3 else "")
            self.client.warn(
                f"the model writes to its parameters ({names}) when it is used. Parameter servers get gradients alone, "
                "so what it writes is lost when a worker fetches parameters; use strategy.network.data: 1 with "
                "strategy.exchange.type: allreduce, or have the model compute with a changed copy."
            )

    def _buffer_push(self, order: Compute) -> BufferPush | None:
        if self._buffers is None:
            return None
        change = self._buffers.change_of(self._places, order.num_samples / order.batch_samples)
        self._buffers.write_to(self._places)
        return change

    def _validate(self, order: Validate) -> None:
        self.pull(order.step if self._by_batch else 0)
        model, sums = self.network.model, dict[str, float]()
        model.eval()
        try:
            with torch.no_grad(), self._stream_of("validation", order.part, order.num_parts).epoch(0) as shares:
                for share in shares:
                    for name, value in self.network.evaluate(share).items():
                        sums[name] = sums.get(name, 0.0) + value
        finally:
            model.train()
        self.client.validated(order, sums)

    def _save(self, order: Save, writer: CheckpointWriter | None) -> None:
        """Write what all servers hold; nothing is under way while they are read."""
        snapshots = self.client.snapshot(order.step if self._by_batch else None)
        if writer is not None:
            self.flat.look_at(self.client.home)
            tensors = load_values(self.network.model, self.flat.values, snapshots)
            slots = whole_slots(self.partition, snapshots)
            kept = to_file(snapshots)
            told = {**self.client.told, RESIDUALS: cut_of(self.settings)} if kept else self.client.told
            writer.save_async(order.step, tensors, slots, told, exchange=kept or None)
            writer.wait()
        self.client.saved(order)
