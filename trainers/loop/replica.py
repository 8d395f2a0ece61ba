"""A replica: one copy of the model, its optimizer, its scheme, and its position in the run.

It joins the other replicas and agrees with them on the state to go on from. When another one is lost, it goes back to
the last completed step. The steps themselves are in `loop`.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from orchestray.platform.comm import objects
from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.process.gpu import Gpu
from orchestray.platform.run.recorder import Recorder
from orchestray.trainers.core.faults import FaultPlan, Faults, without_overlap
from orchestray.trainers.core.members import with_members
from orchestray.trainers.core.model_state import ModelState, StateKeeper
from orchestray.trainers.core.modes import evaluating
from orchestray.trainers.ensemble.member_setup import Members, share_trunk
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.loop import sharded_state
from orchestray.trainers.loop.agreement import agree_on_state, load_sharded
from orchestray.trainers.loop.averages import averaged
from orchestray.trainers.loop.device_metrics import metrics_of
from orchestray.trainers.loop.evaluation import evaluate
from orchestray.trainers.loop.fitting_optimizer import check_outer, make_fitting, num_trained, refuse_cuts, refuse_parts
from orchestray.trainers.loop.growing_batches import plan_of
from orchestray.trainers.loop.loop import Loop
from orchestray.trainers.loop.position import Position
from orchestray.trainers.loop.same_data import refuse_other_data
from orchestray.trainers.loop.saving import refuse_own_saving, save_checkpoint
from orchestray.trainers.loop.sharded_buffers import changed_kinds
from orchestray.trainers.loop.step_buffers import StepBuffers
from orchestray.trainers.loop.step_log import StepLog
from orchestray.trainers.loop.whole_parameters import with_whole_parameters
from orchestray.trainers.optim.averaged import Averaged
from orchestray.trainers.optim.clipping import SpreadSums, clip, clip_pieces
from orchestray.trainers.parallel.assemble import Assembler
from orchestray.trainers.solvers.solver_optimizer import SolverOptimizer
from orchestray.trainers.sync.factory import make_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.core.buffer_kinds import Kind
    from orchestray.trainers.core.exchange import OptimizedTensor
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.core.outcome import Outcome
    from orchestray.trainers.loop.checkpoint_source import Loaded
    from orchestray.trainers.optim.optimizers import Optimizer
    from orchestray.trainers.sync.local.independent import Independent


class Replica:
    """One worker's part of a replica.

    Attributes:
        settings: settings of the run.
        task: the task; that of all members of an ensemble, if this is one.
        device: device of the model.
        position: position in the run.
        recorder: receives metric lines and events.
        log: book-keeping of the steps.
        exchange: scheme by which the replicas agree on the parameters.
        optimizer: optimizer of the tensors that this worker updates.
        average: the same optimizer if it averages the weights; None: there is no average.
        world: all workers of this generation.
        checkpoints: writer of checkpoints; None: another worker writes them.
        saved_step: last step of which there is a checkpoint.
        stop_requested: True if the run is to end after a common step.
        pause_at: step after which `run` ends, with a validation; learning rates are those of the whole budget.
        written_step: last step whose metric lines are known to be on disk; a checkpoint contains the later lines.
        faults: faults that are injected here; None: there are none.
        meter: meter of the activations of the model.
        draw: step, replica and micro-batch that random numbers depend on.
        buffers: the model's buffers around a step, once connected.
        keeper: the state of the model, if this worker holds it whole.
        has_state: True once this worker has a state to go on from.
    """

    def __init__(
        self,
        task: Task,
        settings: ReplicaSettings,
        stream_of: Callable[[str, int], SampleStream],
        *,
        recorder: Recorder | None = None,
        device: torch.device | str = "cpu",
        task_of: Callable[[int], Task] | None = None,
    ) -> None:
        """Build the model and all other parts; nothing here depends on the rank.

        Args:
            task: the task to train.
            settings: settings of the run, the same on every replica.
            stream_of: returns the samples of a split ("train" or "validation") for the given replica.
            recorder: receives the metric lines.
            device: device of the model.
            task_of: returns a replica's task, if the members of an ensemble have different arguments; default: `task`.
        """
        self.settings = settings
        self.task = task
        self.device = torch.device(device)
        self.position = Position()
        self.recorder = recorder or Recorder()
        self.checkpoints: CheckpointWriter | None = None
        self.world: Collective = SoloCollective()
        self.saved_step = self.written_step = 0
        self.stop_requested = False
        self.pause_at = settings.pause_at
        self.faults: Faults | None = None
        self._sums: SpreadSums | None = None
        """Sums over the pieces of parameters; None: every worker has whole ones."""
        self._members = Members(task, settings, lambda: self.groups.data, task_of) if settings.num_members else None
        if self._members is not None:
            self.task = task = self._members.task
        self._assembler = Assembler(task, settings, stream_of, self.device)
        self.draw, self.meter = self._assembler.draw, self._assembler.meter
        self.exchange = make_exchange(
            **without_overlap(settings.exchange, settings.faults),
            compression=settings.compression,
            aggregation=settings.aggregation,
            seed=settings.seed,
        )
        check_outer(settings.exchange, self._assembler.plain_model)
        if self._members is not None:
            share_trunk(cast("Independent", self.exchange), task, self._assembler.plain_model)
        self.optimizer: Optimizer
        if settings.solver is not None:
            plain = self._assembler.plain_model
            self.optimizer = SolverOptimizer(plain, lambda: stream_of("train", 0).num_samples, **settings.solver)
        else:
            self.optimizer = make_fitting(settings.optimizer, self._assembler.plain_model)
        self.average = None if settings.average is None else Averaged(self.optimizer, **settings.average)
        self.optimizer = self.average or self.optimizer
        self.log = StepLog(self.recorder, self.exchange)
        self._stream_of = stream_of
        self._reporting_rank = 0
        """First rank whose loss and metrics count."""
        self.has_state = False
        self._groups: Groups | None = None
        self._network: Network | None = None
        self.buffers: StepBuffers
        self.keeper: StateKeeper
        refuse_own_saving(self._assembler.plain_model, settings)
        if settings.is_replicated:  # the parts do not change when workers come and go
            self._take(self._assembler.assemble(lambda: self.groups))

    @property
    def model(self) -> nn.Module:
        """The part of the model on this worker."""
        return self._network.model if self._network is not None else self._assembler.plain_model

    @property
    def network(self) -> Network:
        """This worker's part of the model, available after `connect`."""
        assert self._network is not None
        return self._network

    @property
    def groups(self) -> Groups:
        """Process groups of this generation."""
        assert self._groups is not None
        return self._groups

    @property
    def built(self) -> Mapping[str, Kind]:
        """Buffers of the plain model as it was built."""
        return self._assembler.built

    def stream(self, split: str) -> SampleStream:
        """Return this replica's samples of a split."""
        return self._stream_of(split, self.groups.coordinate.data)

    @property
    def validates(self) -> bool:
        """True if the task has validation data."""
        return self.stream("validation").num_samples > 0

    def total_steps(self, stream: SampleStream) -> int:
        """Return the number of steps of the whole budget."""
        if self.settings.steps is not None:
            return self.settings.steps
        return plan_of(self.settings, stream, self.position).num_steps(int(self.settings.epochs or 0))

    def run(self, started_at: float) -> Outcome:
        """Train until the budget is used, a condition is met, or a stop is requested; see `Loop.run`.

        Args:
            started_at: wall-clock time of the run's start, in seconds.
        """
        return Loop(self, started_at).run()

    # -- generations ---------------------------------------------------------------------------------------------------

    def connect(self, world: Collective, load: Callable[[], Loaded | None] | None = None, *, attempt: int = 0) -> int:
        """Join a new generation, and agree with the other replicas on the state to resume from.

        Args:
            world: all workers of the generation.
            load: finds the checkpoint to resume from, or returns None; called on rank 0 if no replica has a state.
            attempt: number of the attempt, which decides which one-time faults are over; same as in `FaultPlan.of`.

        Returns:
            The last completed step, the same on all replicas.
        """
        settings = self.settings
        faults = FaultPlan.of(settings.faults, "worker", world.rank, attempt=attempt, seed=settings.seed)
        self.faults = Faults(faults) if faults.faults else None
        self.world = world
        # Survivors go on from what they hold if each holds all of it: nothing undefined may reach that. A sharded state
        # is loaded again, so that it is enough to know before a step counts (see `Loop`).
        world.waits_for_device &= settings.is_replicated
        self._groups = Groups(settings.layout, world)
        self.draw.replica = settings.share_of(self._groups.coordinate.data)
        refuse_other_data(self)
        if settings.is_replicated:
            agree_on_state(self, load)
            self.exchange.attach(self.model, world)
            self.optimizer.join(world)
        else:
            self._assemble_again(world, load)
        self.buffers = StepBuffers(self.model, settings, world=world, replicas=self._groups.data, warn=self.warn)
        if not self.has_state and world.rank == 0 and not self.model.training:
            self.warn(
                "build_model returned the model in evaluation mode, as from_pretrained does, and it is trained in it: "
                "without dropout, and with the running statistics that it has. Call its train() there if that is wrong."
            )
        self.has_state = True
        if self.average is not None:
            self.average.begin(self.stream("train").steps_per_epoch)
        self.log.begin(self.groups)
        self.network.usage()  # of what came before, and so of no step
        self.log.device = metrics_of(self)
        self.log.is_on_device = self.device.type != "cpu"
        if self.device.type == "cuda":
            world.waiting.stream = Gpu(self.device)
        return self.position.step

    def abort(self) -> None:
        """Abort every operation in which this replica waits for other replicas, which notice at once.

        May be called from any thread.
        """
        if self._groups is not None:
            self._groups.abort()

    def close(self) -> None:
        """Disconnect from the other replicas; no operation may be in progress on any replica."""
        if self.has_state and self._network is not None:
            self._network.close()
            self.exchange.detach()
        self.abort()

    def state(self) -> ModelState:
        """Return the state of the model if this worker holds it whole; it shares the model's memory.

        Raises:
            CheckpointError: the model could not be restored from it.
        """
        state = self.keeper.state()
        self.keeper.verify(self._assembler.build_another, state)
        return state

    def become(self, model: ModelState, optimizer: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        """Copy the state of another replica that is already connected.

        Args:
            model: result of `state`.
            optimizer: tensors by their names in `Optimizer.state_tensors`.
            position: fields of a `Position`.

        Raises:
            CheckpointError: the tensors do not fit.
        """
        self.keeper.restore(model)
        self.optimizer.load_state_tensors(optimizer)
        self.position = Position(**position)
        self.recorder.forget_after(self.position.step)
        self.has_state = True

    def _take(self, network: Network) -> None:
        self._network = network
        named = [(name, p) for name, p in network.model.named_parameters() if p.requires_grad]
        tensor_group = None if self._groups is None else self._groups.tensor
        self.optimizer.observe(network.model, network.pieces, tensor_group, network.partial)
        if self.settings.is_replicated:
            self.optimizer.init(named)
            self.keeper = StateKeeper(network.model)

    def _assemble_again(self, world: Collective, load: Callable[[], Loaded | None] | None) -> None:
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
        plain = self._assembler.plain_model
        num_elements = num_trained(plain)
        dtypes = {name: parameter.dtype for name, parameter in plain.named_parameters() if parameter.requires_grad}
        del plain  # which would stay in memory
        world.barrier()  # workers in threads share torch's generator: none may seed it or draw before all are built
        network = self._assembler.assemble(lambda: groups)
        self._take(network)
        self.exchange.attach(network.model, groups.data, network.pieces)
        updates = self.exchange.updates()
        refuse_parts(self.optimizer, self.settings.optimizer["type"], updates, num_elements)
        holders = groups.model if self.exchange.diverges else world
        self._sums = sums = SpreadSums(updates, holders, dtypes)
        if network.streams:  # each stage updates by itself
            refuse_cuts(self.optimizer, self.settings.optimizer["type"], updates)
        else:
            self.optimizer = with_whole_parameters(self.optimizer, sums)
        self.optimizer.init([(update.name, update.tensor) for update in updates])
        replicas = SoloCollective() if self.exchange.diverges else groups.data
        self.optimizer.join(replicas, is_alike=self.settings.exchange.get("shard", "none") == "none")
        if not network.streams:
            self.optimizer.norm_reducer, self.optimizer.total_reducer = sums.of, sums.totals
        load_sharded(self, load)
        for text in self._assembler.warnings:
            self.warn(text)
        reporting = objects.gather_json(world, network.is_reporting)
        self._reporting_rank = reporting.index(True)

    def _become_member(self, members: Members, index: int) -> None:
        """Switch to this worker's member of the ensemble, which is known only after connecting."""
        self._assembler.become_member(self.settings.seed_of(index), members.task_of(index))
        members.check(self._stream_of, index, self.world)
        if self.settings.members:
            self.optimizer = make_fitting(self.settings.of_member(index).optimizer, self._assembler.plain_model)

    def warn(self, text: str | None) -> None:
        """Record a warning, if there is one."""
        if text:
            self.recorder.record({"event": "warning", "step": self.position.step, "text": text})

    # -- parts of a step -----------------------------------------------------------------------------------------------

    def passes(self, step: int) -> AbstractContextManager[object]:
        """Return the context of a step's forward and backward passes: the meter, if it is due, and the faults."""
        if self.faults is None and not self.meter.is_due(step):
            return contextlib.nullcontext()
        with contextlib.ExitStack() as around:
            around.enter_context(self.meter.step(step))
            if self.faults is not None:
                around.enter_context(self.faults.during(step, self.model))
            return around.pop_all()

    def clip(
        self, updates: Sequence[OptimizedTensor], gradients: Sequence[Tensor | None], limit: float
    ) -> float | Tensor:
        """Scale the gradients so that their joint 2-norm is at most `limit`, and return the norm before."""
        if self._sums is None or (self.exchange.diverges and self.groups.model.size == 1):
            return clip(gradients, limit)
        return clip_pieces(updates, gradients, limit, self._sums)

    def roll_back(self) -> None:
        """Restore the state of the last completed step after a failed one.

        A sharded state is not restored here: it is loaded again in any case.
        """
        self.log.settle(self.position)
        if not self.settings.is_replicated:
            return
        for parameter in self.model.parameters():
            parameter.grad = None
        self.buffers.roll_back()

    # -- between the steps ---------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Validate the current model even if no validation is due; do nothing without samples. Every worker calls.

        If the run averages the weights, the model is that of the average.
        """
        if not self.validates:
            return
        self.log.settle(self.position)
        if self.log.device is not None:
            self.log.device.pause()
        # Validating an ensemble as a whole is not part of its members' training.
        counting = contextlib.nullcontext() if self.exchange.shares_batch else self.log.uncounted()
        stream, source = self.stream("validation"), self._reporting_rank
        with averaged(self, measured=True), self.evaluating(), self.exchange.consensus(), counting:
            self.buffers.begin()
            metrics = evaluate(self.network, self.exchange, stream, self.world, source, self.task, self.buffers)
            if self.exchange.diverges:
                self.buffers.keep_memory()
            self.buffers.end()
        position, values = self.position, with_members(metrics)
        position.validation, position.validated_step = values, position.step
        self.recorder.record(self.log.line(position.step, position.epoch, split="validation", **values))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have the model evaluate inside the context: without gradients, and at the last completed step."""
        self.draw.step = self.position.step
        with evaluating(self.model), torch.no_grad():
            yield

    def write_checkpoints_with(self, writer: CheckpointWriter) -> None:
        """Make this replica the one that writes checkpoints."""
        self.checkpoints = writer
        if self.settings.is_replicated:
            writer.prepare(self.state().tensors, self.optimizer.state_tensors())

    def save(self) -> None:
        """Save a checkpoint. All workers call if the state is sharded; rank 0 writes."""
        self.log.settle(self.position)
        with self.log.uncounted():  # saving is not part of the training, same as for synchronous schemes
            save_checkpoint(self)
        self.saved_step = self.position.step

    def trained_model(self) -> ModelState:
        """Return the state of the plain model on rank 0, an empty one elsewhere. Every worker calls.

        If the run averages the weights, they are those of the average.
        """
        is_measured = self.position.validated_step == self.position.step
        with averaged(self, measured=not is_measured):
            if not self.settings.is_replicated:
                kinds = changed_kinds(self)
                return ModelState(sharded_state.gather_plain(self.world, self.exchange.held()), buffers=kinds)
            state = self.state()
            if self.average is None:
                return state
            return replace(state, tensors={name: tensor.clone() for name, tensor in state.tensors.items()})
