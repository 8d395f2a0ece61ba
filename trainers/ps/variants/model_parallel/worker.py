"""A worker of DistBelief: several processes, each of which is connected to the servers of its own parameters.

The processes are the stages of a pipeline, or split layers over a tensor group, or both; "stage" means one of them
here. The stages of a replica are a group of their own, which starts and ends together; replicas never communicate with
each other. The first stage is the worker that the coordinator knows. It gets the orders, passes them on to the others,
and reports a share once the servers of all stages have its gradient. A lost stage ends its replica (the others see
`PeerLostError`). The share then goes back and is computed by another replica, and the servers that lack it apply it.

The coordinator is on the first server of the first stage only. Each stage's first server keeps the stage's buffers.
Updates are pushes or batches, as for whole networks: an order's `min_version` counts on the servers of every stage.

Source: Dean et al., "Large Scale Distributed Deep Networks" (2012), sections 3 and 4.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.comm.objects import gather_json, share_json, share_tensors
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.buffer_kinds import transient
from orchestray.trainers.core.faults import Faults
from orchestray.trainers.core.model_state import BUFFER
from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.loop.same_data import compare_data
from orchestray.trainers.loop.saving import refuse_own_saving
from orchestray.trainers.parallel.assemble import Assembler
from orchestray.trainers.ps.protocol.assignments import (
    Compute,
    Deposit,
    Order,
    Save,
    Validate,
    order_from_json,
    order_to_json,
)
from orchestray.trainers.ps.protocol.factors import capture_of
from orchestray.trainers.ps.protocol.partition import FlatModel, Partition, Unit, trainable
from orchestray.trainers.ps.protocol.requests import Report
from orchestray.trainers.ps.protocol.residuals import (
    Kept,
    deposit,
    hand_over,
    kept_by,
    lost_text,
    take_up,
    to_file,
)
from orchestray.trainers.ps.protocol.settings import Factors
from orchestray.trainers.ps.protocol.state import load_values, whole_slots
from orchestray.trainers.ps.variants.model_parallel.parts import StageParts
from orchestray.trainers.ps.variants.model_parallel.plan import in_stages
from orchestray.trainers.ps.worker.client import ShardClient
from orchestray.trainers.ps.worker.order_loop import OrderLoop

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.base import Channel
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.source import Source
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.parallel.pipeline.balance import Bounds

FIRST = 0
"""Rank of the stage that the lead server knows."""


class StagedWorker(OrderLoop):
    """One stage of a replica. All stages of a replica are created, and run, at the same time.

    Attributes:
        flat: this stage's parameters, in one tensor.
        partition: partition of this stage's parameters over its servers.
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
        unit: Unit = "element",
        factors: Factors = "never",
        bounds: Bounds | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Take the same arguments as `OrderLoop`; of the layout only the tensor and pipeline degrees count here.

        Args:
            task: task to learn.
            settings: settings of the run.
            stream_of: returns the samples of a split as part i of n sees them.
            source: training samples.
            world: group of the stages of this replica, in order.
            num_shards: number of servers of each stage.
            unit: what each of them holds whole.
            factors: use of factors instead of the gradients of fully connected layers.
            bounds: cut of the network (`StagePlan.bounds`); None: the stages decide it together.
            device: device of this stage.

        Raises:
            PeerLostError: another stage did not come.
            TrainingError: another stage has other data.
            ConfigError: stages share a parameter, or a layer cannot be split.
        """
        super().__init__(task, settings, stream_of, source)
        self._world = world
        compare_data(world, self.marks())
        tensor = settings.layout.tensor
        own = in_stages(replace(settings, layout=Layout(tensor=tensor, pipeline=world.size // tensor)))
        self._assembler = Assembler(task, own, lambda split, _: stream_of(split, 0, 1), torch.device(device))
        if bounds:
            self._assembler.cut_at(bounds)
        refuse_own_saving(self._assembler.plain_model, settings)
        self._groups = Groups(own.layout, world)
        self._prepare(self._assembler.plain_model)
        self._assembled(self._assembler.assemble(lambda: self._groups), self._groups.tensor)
        self._refuse_shared()
        self._parts = StageParts(self.network, self._groups, unit)
        self.flat = FlatModel(self._parts.held)
        self.partition = Partition.of(self._parts.held, num_shards, unit=unit)
        self.factors = capture_of(self.network.model, factors, frozenset(self._parts.names))
        """Inputs and errors of fully connected layers, which are sent instead of gradients; None: they are not."""
        self._waited_before_s = self._groups.waiting.total_s

    @property
    def bytes_sent(self) -> int:
        """Number of bytes sent to the other stages."""
        return self._groups.bytes_sent

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for servers, and for the other stages."""
        among_stages_s = self._groups.waiting.total_s - self._waited_before_s  # without the wait to connect
        return among_stages_s + (0.0 if self._client is None else self._client.waited_s)

    @property
    def bytes_saved(self) -> int:
        """Number of bytes saved by compressing gradients."""
        return 0 if self._client is None else self._client.encoder.bytes_saved

    def counts(self) -> dict[str, float]:
        return {**super().counts(), "bytes": self.bytes_sent}

    @property
    def kept(self) -> Kept | None:
        """State of this stage's compressors; None without compression."""
        return kept_by(self._client)

    @property
    def is_first(self) -> bool:
        """True if the lead server knows this stage."""
        return self._world.rank == FIRST

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
        """Work until the lead has nothing more to do.

        Args:
            channels: channels to this stage's servers; the first of the first stage is the lead.
            replica: number by which the coordinator knows the replica.
            writer: writer of checkpoints; only the first stage's is used.
            faults: faults that happen here on purpose.
            replace_server: see `ShardClient`.
            kept: state of the compressors of this stage of the replica, if it was in this process before.

        Returns:
            The reason of the end.

        Raises:
            PeerLostError: another stage of the replica is lost.
            ChannelClosedError: a server is lost.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """
        self._faults = faults or Faults()
        self._client = ShardClient(
            channels,
            self.partition,
            replica,
            self.flat.values,
            buffers=self._buffers,
            compressors=self._compressors(replica, self.partition.num_shards),
            replace=replace_server,
        )
        try:
            self.client.hello(data=self.marks())
            self._take_up(kept)
            self.client.pull()  # the stage's initial or earlier parameters may not be those of the run
            self._parts.spread()
            return self._work(writer)
        except BaseException:
            self.close()
            raise

    def trained_model(self, step: int = 0) -> dict[str, Tensor]:
        """Return the plain model's tensors as the servers hold them after `step`. All stages call this together."""
        self._pull(step)
        return self._parts.bring_together(model_tensors(self.network.model))

    def close(self) -> None:
        """Leave the other stages and the servers; the shares of this replica are handed out again. From any thread."""
        self._groups.abort()
        if self._client is not None:
            self._client.close()

    def _take_up(self, kept: Kept | None) -> None:
        """Continue with the state of this stage's compressors."""
        if self.settings.has_residual:
            lost = gather_json(self._world, take_up(self.client, kept))
            if self.is_first and any(lost):
                self.client.warn(lost_text(self.client.worker))

    def _deposit_with(self, send: Callable[[ShardClient], None]) -> None:
        """Send the compressors' state to the servers of this stage, and wait for the other stages to do the same."""
        send(self.client)
        gather_json(self._world, None)

    def _leave(self) -> None:
        self._deposit_with(hand_over)

    def _deposit(self, order: Deposit) -> None:
        self._deposit_with(deposit)
        if self.is_first:
            self.client.deposited(order)

    # -- orders ------------------------------------------------------------------------------------------------------

    def _next(self) -> Order:
        order = order_to_json(self.client.next()) if self.is_first else None
        return order_from_json(share_json(self._world, order, FIRST))

    def _pull(self, min_version: int) -> None:
        """Pull the servers' parameters into this stage, of at least `min_version` batches where updates are batches."""
        self.client.pull(min_version if self._by_batch else 0, only_newer=not self._by_batch)
        self._parts.spread()
        if self._buffers is not None:
            self._buffers.write_to(self._places)

    def _compute(self, order: Compute, reader: ShareReader) -> list[Order]:
        self._pull(order.min_version)
        began_s, waited_s = time.perf_counter(), self._groups.waiting.total_s
        share = reader.read(order)
        self.flat.begin()
        for parameter in self.network.model.parameters():  # of those that other workers have servers for as well
            parameter.grad = None
        if self.factors is not None:
            self.factors.begin()
        loss_sum = self._backward(order, share, self._assembler.draw)
        self._count(order, time.perf_counter() - began_s - (self._groups.waiting.total_s - waited_s))
        self._parts.gather_gradients()
        # Not `flat.unused`: a schedule that splits the backward pass makes gradients without calling its hooks.
        unused = [name for name, parameter in self._parts.held.named_parameters() if parameter.grad is None]
        client, buffers, measured = self.client, self._buffer_push(order), self._measured(self.partition)
        gradients = self.flat.gradients
        factored = None if self.factors is None else self.factors.gradient(gradients)
        gradient = gradients if factored is None else factored
        pushed = client.push([order], gradient, loss_sums=None, unused=unused, buffers=buffers, measured=measured)
        loss = loss_sum if self.network.is_reporting else None
        own = [
            loss,
            pushed.staleness,
            client.bytes_moved,
            self.bytes_sent,
            client.encoder.bytes_saved,
            client.encoder.error,
        ]
        reports = gather_json(self._world, own)
        if not self.is_first:
            return []
        losses, late, moved, sent, saved, errors = zip(*reports, strict=True)
        client.others_bytes, client.others_saved = sum(moved[1:]) + sum(sent), sum(saved[1:])
        client.others_errors = errors[1:]
        loss, read = next(loss for loss in losses if loss is not None), client.versions[0]
        client.acknowledge([Report(order.order_id, loss, read, read + max(late))])
        return []

    def _combine(self) -> None:
        """Sum the gradients of which each worker of the tensor group has a part."""
        parameters = dict(self.network.model.named_parameters())
        updates = self._exchange.updates()
        gradients = self._exchange.gradients()
        self.network.combine(updates, gradients)
        for update, gradient in zip(updates, gradients, strict=True):
            parameters[update.name].grad = gradient

    def _validate(self, order: Validate) -> None:
        self._pull(order.step)
        sums = self._evaluate(order, self._assembler.draw)
        reports = gather_json(self._world, sums if self.network.is_reporting else None)
        if self.is_first:
            self.client.validated(order, next(sums for sums in reports if sums is not None))

    def _save(self, order: Save, writer: CheckpointWriter | None) -> None:
        """Write what the servers of all stages hold to a checkpoint; no push is in progress while they are read."""
        snapshots = self.client.snapshot(order.step if self._by_batch else None)
        load_values(self.network.model, self.flat.values, snapshots)
        self._parts.spread()
        tensors = self._parts.bring_together(model_tensors(self.network.model))
        slots = self._parts.bring_together(whole_slots(self.partition, snapshots), are_slots=True)
        beside = self._parts.bring_together(transient(self.network.model))
        kept = self._all_kept(snapshots) if self.settings.has_residual else {}
        if not self.is_first:
            return
        if writer is not None:
            named = {BUFFER + name: tensor for name, tensor in beside.items()}
            self._write(writer, order, tensors, slots, kept=kept, beside=named)
        self.client.saved(order)

    def _all_kept(self, snapshots: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the copies of compressors' states on all stages' servers, by the names of a checkpoint; on the first
        stage.
        """
        mine = to_file(snapshots, self._world.rank * self.partition.num_shards)
        found: dict[str, Tensor] = {}
        for stage in range(self._world.size):
            found |= share_tensors(self._world, mine if stage == self._world.rank else None, stage)
        return found if self.is_first else {}

    # -- the other stages --------------------------------------------------------------------------------------------

    def _refuse_shared(self) -> None:
        if self._groups.coordinate.tensor != 0:
            own: list[str] = []  # the first worker of each tensor group reports for it
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
