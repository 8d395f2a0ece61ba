"""What a replica is between two steps, and how it comes to it: agreed with the others, loaded, saved, gone back to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.collective import Collective, SoloCollective
from orchestray.trainers.consolidation.members import change_of_members, first_member
from orchestray.trainers.consolidation.setting_up import Members, share_trunk
from orchestray.trainers.exchange import make_exchange
from orchestray.trainers.exchange.base import Held
from orchestray.trainers.exchange.diverging import Diverging
from orchestray.trainers.exchange.holdings import held_slots, wanted_slots
from orchestray.trainers.exchange.independent import Independent
from orchestray.trainers.faults import held_back
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.layout.pieces import Piece
from orchestray.trainers.network.assemble import Assembler
from orchestray.trainers.optimizers import Optimizer, make_optimizer
from orchestray.trainers.replica import agreement, sharded_state
from orchestray.trainers.replica.clipping import whole_norms, whole_totals
from orchestray.trainers.replica.residue import RESIDUALS, dropped_residue
from orchestray.trainers.weights import load_model_tensors, model_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.run.recorder import Recorder
    from orchestray.platform.task import Task
    from orchestray.trainers.checkpoint_source import Loaded
    from orchestray.trainers.network.base import Network
    from orchestray.trainers.replica.settings import ReplicaSettings


@dataclass
class Position:
    """Where a replica is, and what a checkpoint must know beside the tensors. JSON values only."""

    step: int = 0
    """Completed steps."""
    validated_step: int = 0
    validation: dict[str, Any] | None = None
    """What the last validation said."""
    epoch: int = 0
    """Epoch the sums below belong to, counted from 0."""
    epoch_loss_sum: float = 0.0
    epoch_samples: int = 0
    bytes_sent: int = 0
    """Sent by all replicas in the completed steps."""
    bytes_dense: int = 0
    """What that would have been had nothing been compressed."""
    stopped_by: str | None = None
    """`until` or `time_limit_s` once that ended the run."""


class Standing:
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
        """Build the model and everything around it; nothing here depends on the rank. Arguments as of `Replica`."""
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
            **held_back(settings.exchange, settings.faults),
            compression=settings.compression,
            aggregation=settings.aggregation,
            seed=settings.seed,
        )
        if isinstance(self.exchange, Independent):
            share_trunk(self.exchange, task, self.assembler.plain_model)
        self.optimizer = _optimizer_of(settings)
        self._stream_of = stream_of
        self.saved_step = 0
        self.reporting_rank = 0
        """The first whose loss and metrics count."""
        self._has_state = False
        self._in_step = False
        self._groups: Groups | None = None
        self._network: Network | None = None
        if settings.is_replicated:  # the parts stay as they are, whoever comes and goes
            self._take(self.assembler.assemble(lambda: self.groups))

    @property
    def model(self) -> nn.Module:
        """What this worker holds of the model."""
        return self._network.model if self._network is not None else self.assembler.plain_model

    @property
    def network(self) -> Network:
        assert self._network is not None
        return self._network

    @property
    def groups(self) -> Groups:
        """Of this generation."""
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
        """Take part in a new generation: agree with the others on the state to go on from.

        Args:
            collective: all workers of this generation.
            load: finds the checkpoint to go on from; called on rank 0 if no replica holds a state of its own; None if
                there is none.

        Returns:
            The completed step all replicas are at now.
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
        """Leave the groups and channels of this generation; from any thread."""
        if self._groups is not None:
            self._groups.abort()

    def close(self) -> None:
        """As `abort`, and end what was made to talk to the others; nothing is under way any more."""
        if self._has_state and self._network is not None:
            self._network.close()
            self.exchange.detach()
        self.abort()

    def _agree_on_state(self, collective: Collective, load: Callable[[], Loaded | None] | None) -> None:
        source, steps = agreement.farthest(collective, self.position.step if self._has_state else agreement.NO_STATE)
        nobody_has_state = max(steps) == agreement.NO_STATE
        if nobody_has_state and load is not None and collective.rank == 0 and (loaded := load()) is not None:
            model, optimizer = loaded.tensors()
            if loaded.state.get("members"):
                model, optimizer = first_member(model), first_member(optimizer)
            self._restore(model, optimizer, loaded.state["position"])
            self._tell_members(loaded.state)
            self._tell_dropped(loaded.state)
            self.saved_step = self.position.step
        if collective.size > 1 and (nobody_has_state or min(steps) != max(steps)):
            self._adopt(source)
        if self.position.stopped_by == "time_limit_s":
            self.position.stopped_by = None  # the limit is judged again, by this attempt's clock and setting

    def _assemble_again(self, collective: Collective, load: Callable[[], Loaded | None] | None) -> None:
        """Of a spread-out state no survivor holds all: everybody goes on from the last checkpoint."""
        if self._network is not None:
            self._network.close()
            self.exchange.detach()
            self._network = None
        groups = self.groups
        if self._members is not None:
            self._become_member(self._members, groups.coordinate.data)
            collective.barrier()  # members that are threads share torch's generator: all are built before others draw
        network = self.assembler.assemble(lambda: groups)
        self._take(network)
        self.exchange.attach(network.model, groups.data, network.pieces)
        updates = self.exchange.updates()
        self.optimizer.init([(update.name, update.tensor) for update in updates])
        if not self.settings.is_streaming:  # there each stage updates in its own time, and holds its parameters whole
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
            self._tell_members(state)
            if not self._takes_own(state):
                self._tell_dropped(state)
        for text in self.assembler.warnings:
            self.recorder.record({"event": "warning", "step": self.position.step, "text": text})
        reporting = agreement.gather_json(collective, network.is_reporting)
        self.reporting_rank = reporting.index(True)

    def _become_member(self, members: Members, index: int) -> None:
        """Take the parts of this worker's member, of which it is told when it meets the others."""
        self.assembler.become_member(self.settings.seed_of(index), members.task_of(index))
        members.check(self._stream_of, index, self.world)
        if self.settings.members:
            self.optimizer = _optimizer_of(self.settings.of_member(index))

    def _tell_members(self, state: Mapping[str, Any]) -> None:
        """Say so where the checkpoint holds another number of models than this run."""
        if text := change_of_members(int(state.get("members", 0)), self.settings.num_members):
            self.recorder.record({"event": "warning", "step": self.position.step, "text": text})

    def _tell_dropped(self, state: Mapping[str, Any]) -> None:
        """Say so where this run leaves out what the replicas of a checkpoint had yet to send."""
        if text := dropped_residue(state):
            self.recorder.record({"event": "warning", "step": self.position.step, "text": text})

    def _takes_own(self, state: Mapping[str, Any]) -> bool:
        """Whether what the replicas of a checkpoint kept for themselves is for this run's."""
        # Members keep nothing beside the models and optimizers that are saved of each.
        return self._keeps_own and state.get("replicas") == self._replicas() and not self.settings.num_members

    def _load_own(
        self, collective: Collective, streams: sharded_state.Streams | None, state: Mapping[str, Any]
    ) -> None:
        """Take what this replica kept for itself, if as many replicas under the same scheme have saved it."""
        if not self._takes_own(state):
            return
        exchange = self.exchange
        wanted = {f"exchange/{name}": piece for name, piece in exchange.wanted().items()}
        if isinstance(exchange, Diverging):
            wanted |= {f"model/{name}": held.piece for name, held in exchange.own().items()}
            slots = wanted_slots(self.optimizer, exchange.updates())
            wanted |= {f"optimizer/{name}": piece for name, piece in slots.items()}
        wanted = {key: self._privately(key, piece) for key, piece in wanted.items()}
        source = streams.exchange if streams is not None else None
        loaded = sharded_state.load_own(collective, source, wanted)

        def of(kind: str) -> dict[str, Tensor]:
            return {key.removeprefix(f"{kind}/"): t for key, t in loaded.items() if key.startswith(f"{kind}/")}

        if isinstance(exchange, Diverging):
            for name, tensor in of("model").items():
                exchange.own()[name].tensor.copy_(tensor)
            self.optimizer.load_state_tensors(of("optimizer"))
        exchange.load_state(of("exchange"))

    def _own(self) -> dict[str, Held] | None:
        """What this replica keeps for itself; None if the scheme keeps nothing."""
        exchange = self.exchange
        if self.settings.num_members or not (self.settings.diverges or self.settings.has_residue):
            return None
        own = {f"exchange/{name}": held for name, held in exchange.state().items()}
        if isinstance(exchange, Diverging):
            own |= {f"model/{name}": held for name, held in exchange.own().items()}
            own |= {f"optimizer/{name}": held for name, held in held_slots(self.optimizer, exchange.updates()).items()}
        return {key: Held(held.tensor, self._privately(key, held.piece)) for key, held in own.items()}

    def _privately(self, key: str, piece: Piece) -> Piece:
        """The piece under a name that only this replica's workers use."""
        return replace(piece, name=f"replica-{self.groups.coordinate.data}/{key}")

    @property
    def _keeps_own(self) -> bool:
        """Whether a replica keeps anything for itself."""
        return self.settings.diverges or self.settings.has_residue

    def _replicas(self) -> list[Any]:
        """The scheme, and the number of replicas, that a replica's own state belongs to."""
        settings, layout = self.settings, self.settings.layout
        scheme = [settings.exchange.get("type", "allreduce"), settings.compression.get("type", "none"), layout.data]
        # What a residual is owed of, and the shapes of what is kept, hang on these.
        return [*scheme, settings.compression, layout.tensor] if settings.has_residue else scheme

    def _adopt(self, source: int) -> None:
        mine = self.world.rank == source
        position = agreement.share_json(self.world, vars(self.position) if mine else None, source)
        model = agreement.share_tensors(self.world, model_tensors(self.model) if mine else None, source)
        optimizer = agreement.share_tensors(self.world, self.optimizer.state_tensors() if mine else None, source)
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
        """Take a copy of another state; see `Replica.become`."""
        self._restore(model, optimizer, position)

    def write_checkpoints_with(self, writer: CheckpointWriter) -> None:
        """From now on this worker is the one that saves."""
        self.checkpoints = writer
        if self.settings.is_replicated:
            writer.prepare(model_tensors(self.model), self.optimizer.state_tensors())

    def trained_model(self) -> dict[str, Tensor]:
        """The plain model's tensors, on rank 0; nothing elsewhere. Every worker calls."""
        if self.settings.is_replicated:
            return model_tensors(self.model)
        return sharded_state.bring_together(self.world, self.exchange.held())

    def begin_step(self) -> None:
        """Keep what a step that breaks would spoil."""
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

    def save(self, told: Mapping[str, Any]) -> None:
        """Save a checkpoint; `told` goes into its state."""
        step = self.position.step
        state = {"position": dict(vars(self.position)), "num_replicas": self.world.size, **told}
        if self.settings.num_members:
            state["members"] = self.settings.num_members
        if not self.settings.is_replicated:
            state["replicas"] = self._replicas()
            if self.settings.has_residue:
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

    def _counted_once(self, held: Mapping[str, Held]) -> dict[str, Held]:
        """Where every replica has an optimizer of its own: that of the first stands for all."""
        if self.settings.num_members:
            return dict(held)  # under names of their own
        first = not self.settings.diverges or self.groups.coordinate.data == 0
        return {key: Held(item.tensor, item.piece.counted(first)) for key, item in held.items()}

    def consensus(self) -> AbstractContextManager[None]:
        """Within it the model is what the replicas agree on. All workers call, and leave it together."""
        return self.exchange.consensus() if isinstance(self.exchange, Diverging) else nullcontext()

    def agree(self) -> None:
        """Take for good what the replicas agree on: training has ended. All workers call."""
        if isinstance(self.exchange, Diverging):
            self.exchange.agree()

    def roll_back(self) -> None:
        """Undo what the broken step left: the state is again that of the last completed step.

        A state that is spread over the workers is loaded again in any case.
        """
        if not self.settings.is_replicated:
            return
        for parameter in self.model.parameters():
            parameter.grad = None
        if self._in_step and self._buffers and self.world.size > 1:
            torch._foreach_copy_(self._buffers, self._buffers_before)
        self._in_step = False


def _optimizer_of(settings: ReplicaSettings) -> Optimizer:
    return make_optimizer(**{key: value for key, value in settings.optimizer.items() if key != "lr"})
