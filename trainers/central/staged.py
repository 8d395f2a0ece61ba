"""DistBelief: a worker that is several processes, each of which talks to the servers of its own parameters.

They are the stages of a pipeline, or split layers over a tensor group, or both; "stage" means one of them here. The
stages of a replica are a group of their own, which lives and dies together; replicas never talk to each other. The
first stage is the worker that the ledger knows: it gets the orders and tells them to the others, and reports a share
once the servers of all stages have its gradient. A stage that is lost ends its replica (the others see
`PeerLostError`): the share goes back, is computed by another replica, and is taken in by those servers that lack it.

The other stages' servers hold no ledger; only the first server of the first stage does. Each stage's first server keeps
the stage's buffers. Whether updates are pushes or batches is as under whole networks: an order's `min_version` counts
on the servers of every stage.

Source: Dean et al., "Large Scale Distributed Deep Networks" (2012), sections 3 and 4.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.collective import SoloCollective
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.errors import ConfigError
from orchestray.trainers.central.buffers import BufferPush
from orchestray.trainers.central.orders import (
    LEFT,
    Compute,
    Deposit,
    Finish,
    Order,
    Save,
    Validate,
    order_from_json,
    order_to_json,
)
from orchestray.trainers.central.partition import FlatModel, Partition, trainable
from orchestray.trainers.central.residuals import Kept, cut_of, deposit, hand_over, kept_by, lost_text, take_up, to_file
from orchestray.trainers.central.stage_client import StageClient
from orchestray.trainers.central.stage_parts import StageParts
from orchestray.trainers.central.stage_plan import held_buffers, in_stages
from orchestray.trainers.central.state import load_values, whole_slots
from orchestray.trainers.compression import make_compressor
from orchestray.trainers.exchange.allreduce import AllReduce
from orchestray.trainers.faults import Faults
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.network.assemble import Assembler
from orchestray.trainers.replica.agreement import gather_json, share_json, share_tensors
from orchestray.trainers.replica.residue import RESIDUALS
from orchestray.trainers.weights import model_tensors

if TYPE_CHECKING:
    from orchestray.platform.channel.base import Channel
    from orchestray.platform.collective import Collective
    from orchestray.platform.data.source import Source
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.task import Task
    from orchestray.trainers.compression.base import Compressor
    from orchestray.trainers.pipeline.balance import Bounds
    from orchestray.trainers.replica.settings import ReplicaSettings

FIRST = 0
"""The stage that the lead server knows."""


class StagedWorker:
    """One stage of a replica. All stages of a replica are made, and run, at the same time.

    Attributes:
        network: this stage's part.
        partition: of this stage's parameters over its servers.
        num_shares, num_samples: computed.
        busy_s: seconds spent computing them.
    """

    def __init__(
        self,
        task: Task,
        settings: ReplicaSettings,
        stream_of: Callable[[str, int, int], SampleStream],
        source: Source,
        world: Collective,
        *,
        num_shards: int = 1,
        bounds: Bounds | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            task: what is learned.
            settings: of the run; of its layout the degrees of tensor and pipeline count here.
            stream_of: the samples of a split as part i of n sees them.
            source: the training samples.
            world: the stages of this replica, in order.
            num_shards: servers of each stage.
            bounds: where the network was cut (`StagePlan.bounds`); None: it is decided by the stages together.
            device: where this stage lives.

        Raises:
            PeerLostError: another stage did not come.
            ConfigError: stages share a parameter, or a layer cannot be split.
        """
        self.settings = settings
        self.num_shares, self.num_samples, self.busy_s = 0, 0, 0.0
        self._world, self._stream_of = world, stream_of
        self._source, self._to_batch = source, task.to_batch
        tensor = settings.layout.tensor
        own = in_stages(replace(settings, layout=Layout(tensor=tensor, pipeline=world.size // tensor)))
        self._assembler = Assembler(task, own, lambda split, _: stream_of(split, 0, 1), torch.device(device))
        if bounds:
            self._assembler.cut_at(bounds)
        self._groups = Groups(own.layout, world)
        self.network = self._assembler.assemble(lambda: self._groups)
        self._refuse_shared()
        self._parts = StageParts(self.network, self._groups)
        names = frozenset(self._parts.names)
        self.flat = FlatModel(self.network.model, names)
        self.partition = Partition.of(self.network.model, num_shards, names)
        self._buffers = held_buffers(self.network.model)
        self._by_batch = settings.exchange.get("consistency", "asynchronous") != "asynchronous"
        self._exchange = AllReduce()  # of one: all it does is what a network asks of an exchange
        self._exchange.attach(self.network.model, SoloCollective())
        self._client: StageClient | None = None
        self._faults = Faults()
        self._waited_before_s = self._groups.waiting.total_s

    @property
    def bytes_sent(self) -> int:
        """To the other stages."""
        return self._groups.bytes_sent

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for servers, and for the other stages."""
        among_stages_s = self._groups.waiting.total_s - self._waited_before_s  # not to come together
        return among_stages_s + (0.0 if self._client is None else self._client.waited_s)

    @property
    def bytes_saved(self) -> int:
        """By compressing gradients."""
        return 0 if self._client is None else self._client.encoder.bytes_saved

    @property
    def kept(self) -> Kept | None:
        """What this stage's compressors keep."""
        return kept_by(self._client)

    @property
    def is_first(self) -> bool:
        """Whether the lead server knows this stage."""
        return self._world.rank == FIRST

    @property
    def client(self) -> StageClient:
        """The connection to this stage's servers."""
        assert self._client is not None
        return self._client

    def run(
        self,
        channels: Sequence[Channel],
        replica: int,
        *,
        writer: CheckpointWriter | None = None,
        faults: Faults | None = None,
        replace_server: Callable[[int, Exception], Channel] | None = None,
        kept: Kept | None = None,
    ) -> str:
        """Work until the lead says that there is nothing more to do; returns why.

        Args:
            channels: to this stage's servers; the first of the first stage is the lead.
            replica: number of the replica in the ledger.
            writer: of checkpoints; the first stage's counts.
            faults: what goes wrong here on purpose.
            replace_server: see `ShardClient`.
            kept: what the compressors of this stage of the replica kept, if it was in this process before.

        Raises:
            PeerLostError: another stage of the replica is lost.
            ChannelClosedError: a server is lost.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        self._faults = faults or Faults()
        self._client = StageClient(
            channels,
            self.partition,
            replica,
            self.flat.values,
            buffers=self._buffers,
            compressors=self._compressors(replica),
            replace=replace_server,
        )
        try:
            self.client.hello()
            self._take_up(kept)
            self.client.pull()  # what this stage was built with, or had before, need not be where the run is
            self._parts.spread()
            with ShareReader(self._source, self._to_batch, seed=self.settings.seed) as reader:
                while True:
                    order = self._next()
                    if isinstance(order, Finish):
                        if order.reason == LEFT:
                            self._deposit_with(hand_over)
                        return order.reason
                    if isinstance(order, Compute):
                        self._compute(order, reader)
                    elif isinstance(order, Validate):
                        self._validate(order)
                    elif isinstance(order, Deposit):
                        self._deposit_with(deposit)
                        if self.is_first:
                            self.client.deposited(order)
                    elif isinstance(order, Save):
                        self._save(order, writer)
        except BaseException:
            self.close()
            raise

    def trained_model(self, step: int = 0) -> dict[str, Tensor]:
        """The plain model's tensors as the servers hold them after `step`, on every stage; all call together."""
        self._pull(step)
        return self._parts.bring_together(model_tensors(self.network.model))

    def close(self) -> None:
        """Leave the other stages, and the servers: what this replica holds goes back. From any thread."""
        self._groups.abort()
        if self._client is not None:
            self._client.close()

    def _compressors(self, replica: int) -> list[Compressor] | None:
        settings = self.settings
        if settings.compression.get("type", "none") == "none":
            return None
        return [
            make_compressor(
                **settings.compression, seed=settings.seed, worker=replica, num_workers=settings.layout.data
            )
            for _ in range(self.partition.num_shards)
        ]

    def _take_up(self, kept: Kept | None) -> None:
        """Go on with what this stage's compressors kept."""
        if self.settings.has_residue:
            lost = gather_json(self._world, take_up(self.client, kept))
            if self.is_first and any(lost):
                self.client.warn(lost_text(self.client.worker))

    def _deposit_with(self, tell: Callable[[StageClient], None]) -> None:
        """Have the servers of all stages have what is kept."""
        tell(self.client)
        gather_json(self._world, None)

    # -- orders ------------------------------------------------------------------------------------------------------

    def _next(self) -> Order:
        told = order_to_json(self.client.next()) if self.is_first else None
        return order_from_json(share_json(self._world, told, FIRST))

    def _pull(self, min_version: int) -> None:
        """The servers' parameters into this stage, of at least these batches where batches are updates."""
        self.client.pull(min_version if self._by_batch else 0, only_newer=not self._by_batch)
        self._parts.spread()
        if self._buffers is not None:
            self._buffers.write_to(self.network.model)

    def _compute(self, order: Compute, reader: ShareReader) -> None:
        self._pull(order.min_version)
        began_s, waited_s = time.perf_counter(), self._groups.waiting.total_s
        draw = self._assembler.draw
        draw.step, draw.replica = order.step, order.share
        share = reader.read(order)
        self.flat.begin()
        with self._faults.during(order.step, self.network.model):
            loss_sum = self.network.backward(share, self._exchange, step=order.step)
            self._combine()
        self.busy_s += time.perf_counter() - began_s - (self._groups.waiting.total_s - waited_s)
        self.num_shares += 1
        self.num_samples += order.num_samples
        # Not those without a hook's note: a schedule that splits the backward pass makes gradients without it.
        named = trainable(self.network.model, self._parts.names)
        unused = [name for name, parameter in named if parameter.grad is None]
        staleness = self.client.push_only(order, self.flat.gradients, unused, self._buffer_push(order))
        loss = loss_sum if self.network.is_reporting else None
        client = self.client
        own = [loss, staleness, client.bytes_moved, self.bytes_sent, client.encoder.bytes_saved, client.encoder.error]
        told = gather_json(self._world, own)
        if not self.is_first:
            return
        losses, late, moved, sent, saved, errors = zip(*told, strict=True)
        client.others_bytes, client.others_saved = sum(moved[1:]) + sum(sent), sum(saved[1:])
        client.others_errors = errors[1:]
        client.acknowledge(order, next(loss for loss in losses if loss is not None), max(late))

    def _combine(self) -> None:
        """Add up the gradients of which each worker of the tensor group has a part."""
        parameters = dict(self.network.model.named_parameters())
        updates = self._exchange.updates()
        gradients = self._exchange.gradients()
        self.network.combine(updates, gradients)
        for update, gradient in zip(updates, gradients, strict=True):
            parameters[update.name].grad = gradient

    def _buffer_push(self, order: Compute) -> BufferPush | None:
        if self._buffers is None:
            return None
        change = self._buffers.change_of(self.network.model, order.num_samples / order.batch_samples)
        self._buffers.write_to(self.network.model)
        return change

    def _validate(self, order: Validate) -> None:
        self._pull(order.step)
        model, sums = self.network.model, dict[str, float]()
        model.eval()
        try:
            with torch.no_grad(), self._stream_of("validation", order.part, order.num_parts).epoch(0) as shares:
                for share in shares:
                    for name, value in self.network.evaluate(share).items():
                        sums[name] = sums.get(name, 0.0) + value
        finally:
            model.train()
        told = gather_json(self._world, sums if self.network.is_reporting else None)
        if self.is_first:
            self.client.validated(order, next(sums for sums in told if sums is not None))

    def _save(self, order: Save, writer: CheckpointWriter | None) -> None:
        """Write what the servers of all stages hold; nothing is under way while they are read."""
        snapshots = self.client.snapshot(order.step if self._by_batch else None)
        tensors = self._parts.bring_together(load_values(self.network.model, self.flat.values, snapshots))
        slots = self._parts.bring_together(whole_slots(self.partition, snapshots), are_slots=True)
        kept = self._all_kept(snapshots) if self.settings.has_residue else {}
        if not self.is_first:
            return
        if writer is not None:
            told = {**self.client.told, RESIDUALS: cut_of(self.settings)} if kept else self.client.told
            writer.save_async(order.step, tensors, slots, told, exchange=kept or None)
            writer.wait()
        self.client.saved(order)

    def _all_kept(self, snapshots: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What the servers of all stages hold of what compressors keep, as a checkpoint names it; for the first."""
        mine = to_file(snapshots, self._world.rank * self.partition.num_shards)
        found: dict[str, Tensor] = {}
        for stage in range(self._world.size):
            found |= share_tensors(self._world, mine if stage == self._world.rank else None, stage)
        return found if self.is_first else {}

    # -- the other stages --------------------------------------------------------------------------------------------

    def _refuse_shared(self) -> None:
        if self._groups.coordinate.tensor != 0:
            own: list[str] = []  # the first of each tensor group speaks for it
        else:
            own = [name for name, _ in trainable(self.network.model)]
        held: list[Any] = gather_json(self._world, own)
        seen: set[str] = set()
        for names in held:
            twice = seen.intersection(names)
            if twice:
                raise ConfigError(
                    f"strategy.network.split: {min(twice)!r} is tied and would be held by two stages, each with "
                    "its own servers; cut the network so that one stage holds it"
                )
            seen |= set(names)
