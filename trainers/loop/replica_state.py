"""The state of a replica between two steps: agreed on with the other replicas, loaded, saved, rolled back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm import objects
from orchestray.platform.comm.collective import Collective, SoloCollective
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.core.faults import without_overlap
from orchestray.trainers.core.members import change_of_members, first_member
from orchestray.trainers.core.weights import load_model_tensors, model_tensors
from orchestray.trainers.ensemble.member_setup import Members, share_trunk
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.loop import sharded_state
from orchestray.trainers.loop.error_feedback import RESIDUALS, dropped_residuals
from orchestray.trainers.optim.clipping import whole_norms, whole_totals
from orchestray.trainers.optim.optimizers import make_optimizer
from orchestray.trainers.parallel.assemble import Assembler
from orchestray.trainers.sync.common.local_tensors import held_slots, wanted_slots
from orchestray.trainers.sync.common.local_updates import LocalUpdates
from orchestray.trainers.sync.factory import make_exchange
from orchestray.trainers.sync.local.independent import Independent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.run.recorder import Recorder
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.loop.checkpoint_source import Loaded


@dataclass
class Position:
    """The position of a replica in the run: all state of a checkpoint besides its tensors. JSON values only."""

    step: int = 0
    """Number of completed steps."""
    validated_step: int = 0
    validation: dict[str, Any] | None = None
    """Metrics of the last validation."""
    epoch: int = 0
    """Epoch of the sums below, counted from 0."""
    epoch_loss_sum: float = 0.0
    epoch_samples: int = 0
    bytes_sent: int = 0
    """Bytes that all replicas sent in the completed steps."""
    bytes_dense: int = 0
    """Bytes that they would have sent without compression."""
    stopped_by: str | None = None
    """Reason that ended the run, `until` or `time_limit_s`; None before."""


class ReplicaState:
    """The parts of one worker's replica that change with every step: network, optimizer, position."""

    def __init__(
        self,
        task: Task,
        settings: ReplicaSettings,
        stream_of: Callable[[str, int], SampleStream],
        recorder: Recorder,
        device: torch.device,
        task_of: Callable[[int], Task] | None = None,
    ) -> None:
        """Build the model and all other parts, independently of the rank. Arguments are those of `Replica`."""
        self.settings = settings
        self.position = Position()
        self.recorder = recorder
        self.checkpoints: CheckpointWriter | None = None
        self.world: Collective = SoloCollective()
        self._members = Members(task, settings, lambda: self.groups.data, task_of) if settings.num_members else None
        if self._members is not None:
            task = self._members.task
        self.assembler = Assembler(task, settings, stream_of, device)
        self.exchange = make_exchange(
            **without_overlap(settings.exchange, settings.faults),
            compression=settings.compression,
            aggregation=settings.aggregation,
            seed=settings.seed,
        )
        if isinstance(self.exchange, Independent):
            share_trunk(self.exchange, task, self.assembler.plain_model)
        self.optimizer = make_optimizer(**settings.optimizer)
        self._stream_of = stream_of
        self.saved_step = 0
        self.reporting_rank = 0
        """First rank whose loss and metrics count."""
        self._has_state = False
        self._in_step = False
        self._groups: Groups | None = None
        self._network: Network | None = None
        if settings.is_replicated:  # the parts do not change when workers come and go
            self._take(self.assembler.assemble(lambda: self.groups))

    @property
    def model(self) -> nn.Module:
        """The part of the model on this worker."""
        return self._network.model if self._network is not None else self.assembler.plain_model

    @property
    def network(self) -> Network:
        assert self._network is not None
        return self._network

    @property
    def groups(self) -> Groups:
        """Process groups of this generation."""
        assert self._groups is not None
        return self._groups

    def _take(self, network: Network) -> None:
        self._network = network
        named = [(name, p) for name, p in network.model.named_parameters() if p.requires_grad]
        if self.settings.is_replicated:
            self.optimizer.init(named)
        self._buffer_names = [name for name, _ in network.model.named_buffers()]
        self._buffers = list(network.model.buffers())
        self._buffers_before = [buffer.clone() for buffer in self._buffers]

    def connect(self, collective: Collective, load: Callable[[], Loaded | None] | None = None) -> int:
        """Join a new generation, and agree with the other replicas on the state to resume from.

        Args:
            collective: all workers of this generation.
            load: finds the checkpoint to resume from, or returns None; called on rank 0 if no replica has a state.

        Returns:
            The last completed step, the same on all replicas.
        """
        self.world = collective
        self._groups = Groups(self.settings.layout, collective)
        if self.settings.is_replicated:
            self._agree_on_state(collective, load)
            self.exchange.attach(self.model, collective)
        else:
            self._assemble_again(collective, load)
        self._has_state = True
        return self.position.step

    def abort(self) -> None:
        """Leave the groups and channels of this generation. May be called from any thread."""
        if self._groups is not None:
            self._groups.abort()

    def close(self) -> None:
        """Close the network and detach the exchange, then `abort`; no operation may be in progress."""
        if self._has_state and self._network is not None:
            self._network.close()
            self.exchange.detach()
        self.abort()

    def _agree_on_state(self, collective: Collective, load: Callable[[], Loaded | None] | None) -> None:
        source, steps = objects.farthest(collective, self.position.step if self._has_state else objects.NO_STATE)
        nobody_has_state = max(steps) == objects.NO_STATE
        if nobody_has_state and load is not None and collective.rank == 0 and (loaded := load()) is not None:
            model, optimizer = loaded.tensors()
            if loaded.state.get("members"):
                model, optimizer = first_member(model), first_member(optimizer)
            self._restore(model, optimizer, loaded.state["position"])
            self._warn_if_members_change(loaded.state)
            self._warn_if_residuals_dropped(loaded.state)
            self.saved_step = self.position.step
        if collective.size > 1 and (nobody_has_state or min(steps) != max(steps)):
            self._adopt(source)
        if self.position.stopped_by == "time_limit_s":
            self.position.stopped_by = None  # this attempt applies its own time limit

    def _assemble_again(self, collective: Collective, load: Callable[[], Loaded | None] | None) -> None:
        """Assemble the network again and resume from the last checkpoint.

        No survivor holds all of a sharded state.
        """
        if self._network is not None:
            self._network.close()
            self.exchange.detach()
            self._network = None
        groups = self.groups
        if self._members is not None:
            self._become_member(self._members, groups.coordinate.data)
            collective.barrier()  # members in threads share torch's generator, so none may draw before all are built
        network = self.assembler.assemble(lambda: groups)
        self._take(network)
        self.exchange.attach(network.model, groups.data, network.pieces)
        updates = self.exchange.updates()
        self.optimizer.init([(update.name, update.tensor) for update in updates])
        if not self.settings.is_streaming:  # a streaming stage updates by itself, and holds whole parameters
            holders = groups.model if self.settings.diverges else collective
            self.optimizer.norm_reducer = whole_norms(updates, holders)
            self.optimizer.total_reducer = whole_totals(updates, holders)
        loaded = load() if load is not None and collective.rank == 0 else None
        streams = None if loaded is None else loaded.streams()
        shared = self.exchange.shared_names if isinstance(self.exchange, Independent) else ()
        members = self.settings.num_members
        state = sharded_state.load(
            collective, streams, self.exchange, self.optimizer, num_members=members, shared=shared
        )
        if state is not None:
            self._load_own(collective, streams, state)
        self.position = Position(**state["position"]) if state is not None else Position()
        if self.position.stopped_by == "time_limit_s":
            self.position.stopped_by = None
        self.saved_step = self.position.step
        self.recorder.forget_after(self.position.step)
        if state is not None and collective.rank == 0:
            self._warn_if_members_change(state)
            if not self._takes_own(state):
                self._warn_if_residuals_dropped(state)
        for text in self.assembler.warnings:
            self.recorder.record({"event": "warning", "step": self.position.step, "text": text})
        reporting = objects.gather_json(collective, network.is_reporting)
        self.reporting_rank = reporting.index(True)

    def _become_member(self, members: Members, index: int) -> None:
        """Switch to this worker's member of the ensemble, which is known only after connecting."""
        self.assembler.become_member(self.settings.seed_of(index), members.task_of(index))
        members.check(self._stream_of, index, self.world)
        if self.settings.members:
            self.optimizer = make_optimizer(**self.settings.of_member(index).optimizer)

    def _warn_if_members_change(self, state: Mapping[str, Any]) -> None:
        """Record a warning if the checkpoint holds another number of models than this run."""
        if text := change_of_members(int(state.get("members", 0)), self.settings.num_members):
            self.recorder.record({"event": "warning", "step": self.position.step, "text": text})

    def _warn_if_residuals_dropped(self, state: Mapping[str, Any]) -> None:
        """Record a warning if this run drops the residuals of a checkpoint."""
        if text := dropped_residuals(state):
            self.recorder.record({"event": "warning", "step": self.position.step, "text": text})

    def _takes_own(self, state: Mapping[str, Any]) -> bool:
        """Return True if the replicas' own state in a checkpoint fits this run."""
        # Members of an ensemble have no state besides the saved models and optimizers.
        return self._keeps_own and state.get("replicas") == self._replicas() and not self.settings.num_members

    def _load_own(
        self, collective: Collective, streams: sharded_state.Streams | None, state: Mapping[str, Any]
    ) -> None:
        """Load this replica's own state if the same number of replicas saved it under the same scheme."""
        if not self._takes_own(state):
            return
        exchange = self.exchange
        wanted = {f"exchange/{name}": piece for name, piece in exchange.wanted().items()}
        if isinstance(exchange, LocalUpdates):
            wanted |= {f"model/{name}": held.piece for name, held in exchange.own().items()}
            slots = wanted_slots(self.optimizer, exchange.updates())
            wanted |= {f"optimizer/{name}": piece for name, piece in slots.items()}
        wanted = {key: self._privately(key, piece) for key, piece in wanted.items()}
        source = streams.exchange if streams is not None else None
        loaded = sharded_state.load_own(collective, source, wanted)

        def of(kind: str) -> dict[str, Tensor]:
            return {key.removeprefix(f"{kind}/"): t for key, t in loaded.items() if key.startswith(f"{kind}/")}

        if isinstance(exchange, LocalUpdates):
            for name, tensor in of("model").items():
                exchange.own()[name].tensor.copy_(tensor)
            self.optimizer.load_state_tensors(of("optimizer"))
        exchange.load_state(of("exchange"))

    def _own(self) -> dict[str, LocalTensor] | None:
        """Return this replica's own state; None if the scheme has none."""
        exchange = self.exchange
        if self.settings.num_members or not (self.settings.diverges or self.settings.has_residual):
            return None
        own = {f"exchange/{name}": held for name, held in exchange.state().items()}
        if isinstance(exchange, LocalUpdates):
            own |= {f"model/{name}": held for name, held in exchange.own().items()}
            own |= {f"optimizer/{name}": held for name, held in held_slots(self.optimizer, exchange.updates()).items()}
        return {key: LocalTensor(held.tensor, self._privately(key, held.piece)) for key, held in own.items()}

    def _privately(self, key: str, piece: TensorSlice) -> TensorSlice:
        """Return the piece under a name that only this replica's workers use."""
        return replace(piece, name=f"replica-{self.groups.coordinate.data}/{key}")

    @property
    def _keeps_own(self) -> bool:
        """True if each replica has state of its own."""
        return self.settings.diverges or self.settings.has_residual

    def _replicas(self) -> list[Any]:
        """Return the scheme and the number of replicas that a replica's own state belongs to."""
        settings, layout = self.settings, self.settings.layout
        scheme = [settings.exchange.get("type", "allreduce"), settings.compression.get("type", "none"), layout.data]
        # The meaning of a residual and the shapes of the state depend on these.
        return [*scheme, settings.compression, layout.tensor] if settings.has_residual else scheme

    def _adopt(self, source: int) -> None:
        mine = self.world.rank == source
        position = objects.share_json(self.world, vars(self.position) if mine else None, source)
        model = objects.share_tensors(self.world, model_tensors(self.model) if mine else None, source)
        optimizer = objects.share_tensors(self.world, self.optimizer.state_tensors() if mine else None, source)
        if not mine:
            self._restore(model, optimizer, position)

    def _restore(
        self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], position: Mapping[str, Any]
    ) -> None:
        load_model_tensors(self.model, model)
        self.optimizer.load_state_tensors(optimizer)
        self.position = Position(**position)
        self.recorder.forget_after(self.position.step)
        self._has_state = True

    def become(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        """Copy the state of another replica; same as `Replica.become`."""
        self._restore(model, optimizer, position)

    def write_checkpoints_with(self, writer: CheckpointWriter) -> None:
        """Make this worker the one that writes checkpoints."""
        self.checkpoints = writer
        if self.settings.is_replicated:
            writer.prepare(model_tensors(self.model), self.optimizer.state_tensors())

    def trained_model(self) -> dict[str, Tensor]:
        """Return the plain model's tensors on rank 0, an empty mapping elsewhere. Every worker calls."""
        if self.settings.is_replicated:
            return model_tensors(self.model)
        return sharded_state.gather_plain(self.world, self.exchange.held())

    def begin_step(self) -> None:
        """Copy the buffers, which a failed step would corrupt."""
        if self.settings.is_replicated and self.world.size > 1 and self._buffers:
            torch._foreach_copy_(self._buffers_before, self._buffers)
        self._in_step = True

    def complete_step(self, step: int, epoch: int, batch_samples: int, loss: float) -> None:
        position = self.position
        if epoch != position.epoch:
            position.epoch, position.epoch_loss_sum, position.epoch_samples = epoch, 0.0, 0
        position.step = step
        self._in_step = False
        position.epoch_loss_sum += loss * batch_samples
        position.epoch_samples += batch_samples

    def save(self, extra: Mapping[str, Any]) -> None:
        """Save a checkpoint; the entries of `extra` are added to its state."""
        step = self.position.step
        state = {"position": dict(vars(self.position)), "num_replicas": self.world.size, **extra}
        if self.settings.num_members:
            state["members"] = self.settings.num_members
        if not self.settings.is_replicated:
            state["replicas"] = self._replicas()
            if self.settings.has_residual:
                state[RESIDUALS] = self._replicas()
            sharded_state.save(
                self.world,
                self.checkpoints,
                step,
                self.exchange.held(),
                self._counted_once(held_slots(self.optimizer, self.exchange.updates())),
                state,
                exchange=self._own(),
                consensus=self.consensus,
            )
        elif self.checkpoints is not None:
            self.checkpoints.save_async(
                step, model_tensors(self.model), self.optimizer.state_tensors(), state, buffers=self._buffer_names
            )
        self.saved_step = step

    def _counted_once(self, held: Mapping[str, LocalTensor]) -> dict[str, LocalTensor]:
        """Return the tensors, counted only on the first replica if every replica has its own optimizer."""
        if self.settings.num_members:
            return dict(held)  # each member has names of its own
        first = not self.settings.diverges or self.groups.coordinate.data == 0
        return {key: LocalTensor(item.tensor, item.piece.counted(first)) for key, item in held.items()}

    def consensus(self) -> AbstractContextManager[None]:
        """Install the consensus model of the replicas inside the context.

        All workers call, and leave the context together.
        """
        return self.exchange.consensus() if isinstance(self.exchange, LocalUpdates) else nullcontext()

    def agree(self) -> None:
        """Adopt the consensus model permanently, at the end of training. All workers call."""
        if isinstance(self.exchange, LocalUpdates):
            self.exchange.agree()

    def roll_back(self) -> None:
        """Restore the state of the last completed step after a failed one.

        A sharded state is not restored here: it is loaded again in any case.
        """
        if not self.settings.is_replicated:
            return
        for parameter in self.model.parameters():
            parameter.grad = None
        if self._in_step and self._buffers and self.world.size > 1:
            torch._foreach_copy_(self._buffers, self._buffers_before)
        self._in_step = False
