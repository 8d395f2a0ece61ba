"""The process of a parameter server, as a member of the gang of servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from orchestray.platform.data.mark import warn_of_shared_rows
from orchestray.platform.data.retries import READS
from orchestray.platform.data.source import open_split
from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.platform.run.recorder import Recorder
from orchestray.trainers import tasks
from orchestray.trainers.aggregation.base import Aggregation, make_aggregation
from orchestray.trainers.config.goals import refuse_without_validation
from orchestray.trainers.core.model_state import load_state
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.core.own_saving import loads_itself
from orchestray.trainers.core.parts import parts_of, reports_of
from orchestray.trainers.core.plain_model import build_model
from orchestray.trainers.core.process_memory import peak_memory_bytes
from orchestray.trainers.core.rng import seed_everything
from orchestray.trainers.loop.checkpoint_source import newest
from orchestray.trainers.loop.error_feedback import RESIDUALS, dropped_residuals
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.grouped_optimizer import check_matches
from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.coordinator.lead_recorder import LeadRecorder
from orchestray.trainers.ps.durability.persistence import DiskLog, holds_snapshot, restore
from orchestray.trainers.ps.durability.replication import Backup, Replicator
from orchestray.trainers.ps.protocol.address import COMPLETE_KEY, MEMORY_KEY, Address, StagePlan
from orchestray.trainers.ps.protocol.buffers import Buffers
from orchestray.trainers.ps.protocol.encoding import compressor_of
from orchestray.trainers.ps.protocol.host_bases import AcceptingHost, dial
from orchestray.trainers.ps.protocol.partition import Partition, Slice, flatten_parameters
from orchestray.trainers.ps.protocol.residuals import cut_of, of_file
from orchestray.trainers.ps.protocol.settings import CentralSettings
from orchestray.trainers.ps.protocol.state import slots_of_shard
from orchestray.trainers.ps.server.dyn_sgd import Revision
from orchestray.trainers.ps.server.server import ShardServer
from orchestray.trainers.ps.server.shard import Rates, Shard
from orchestray.trainers.ps.server.state_machine import Machine
from orchestray.trainers.ps.variants.hierarchy.root_server import RootMachine, RootServer
from orchestray.trainers.ps.variants.hogwild.server import HogwildServer, OrderingMachine, share
from orchestray.trainers.ps.variants.model_parallel.parts import cut_slots
from orchestray.trainers.ps.variants.model_parallel.plan import buffers_of_stage, held_buffers, part_of_stage
from orchestray.trainers.saved.initial_weights import with_initial_weights

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.comm.channel.base import Channel
    from orchestray.platform.data.source import Source
    from orchestray.trainers.config.settings import ReplicaSettings, Start
    from orchestray.trainers.loop.checkpoint_source import Loaded
    from orchestray.trainers.ps.variants.hogwild.shared_values import SharedValues


class ServerHost(AcceptingHost):
    """A host of one copy of one shard; rank 0 is the lead."""

    def __init__(self, settings: ReplicaSettings) -> None:
        super().__init__("parameter server")
        self._recorder = Recorder()
        READS.begin(lambda text: self._recorder.record({"event": "warning", "step": 0, "text": text}))
        self._settings = settings
        self._central = CentralSettings.of(settings)
        self._task = with_initial_weights(tasks.build(settings.task), settings.initial)
        self._server: ShardServer | None = None
        self._backup: Backup | None = None
        self._to_copies: list[Channel] = []
        """Channels to copies of this server, which carry nothing else; those that have ended, too."""
        self._lead_recorder: LeadRecorder | None = None
        self._shared: SharedValues | None = None
        self._plan: StagePlan | None = None
        self._started_at = 0.0

    # -- in the working thread -----------------------------------------------------------------------------

    def begin(
        self, rank: int, start: Start, address: str, is_copy: bool | None = None, plan: StagePlan | None = None
    ) -> int:
        """Serve from the newest checkpoint, or from the start. Called again after a server without copies was lost.

        Args:
            rank: rank of this server.
            start: start of the run.
            address: address of this node, by which others reach it.
            is_copy: True if it follows another server at first; default: the first servers, one per shard, do not.
            plan: plan of replicas in stages, each of which has servers of its own; None: workers hold the whole
                network.

        Returns:
            The port at which workers connect to this server.

        Raises:
            ConfigError: a stage has fewer parameters than servers.
            CheckpointError: the log on disk is older than the checkpoint.
        """
        self.close()
        self._plan = plan
        self._rank, self._address = rank, address
        follows = rank >= self._central.shards if is_copy is None else is_copy
        loaded = newest(self._settings.checkpoint_storage, start.checkpoint)
        seed_everything(self._settings.seed)
        model = build_model(self._task)
        groups = self._settings.optimizer.get("groups", ())
        check_matches(groups, model.named_parameters())
        if self._settings.precision == "float64":
            model = model.double()
        optimizer_state: Any = {}
        position: dict[str, Any] = {}
        if loaded is not None:
            saved, optimizer_state = loaded.model(), loaded.optimizer()
            if saved.buffers:
                raise CheckpointError(
                    f"The buffers {', '.join(saved.buffers)} of the checkpoint have other sizes than those of a "
                    "fresh model, and parameter servers keep buffers of fixed sizes. Go on with "
                    "strategy.exchange.type: allreduce."
                )
            if loads_itself(model):
                raise CheckpointError(
                    "A module of the model does more than copy when its state is loaded (load_state_dict hooks). The "
                    "workers of parameter servers load none, they pull the parameters. Go on with "
                    "strategy.exchange.type: allreduce."
                )
            load_state(model, saved)
            position = dict(loaded.state["position"])
        machine = self._machine(model, optimizer_state, position)
        if loaded is not None:
            self._load_residuals(machine, loaded, start.attempt)
        self._started_at = start.started_at
        if self._lead_recorder is not None:
            machine.listener = self._lead_recorder.note
        if follows:
            self._backup = Backup(machine)
        else:
            step = int(position.get("step", 0))
            later = self._restore(machine, step) if start.attempt > 0 else None
            if self._lead_recorder is not None:  # in the order of the steps
                lines = list(loaded.state.get("lines", [])) if loaded is not None else []
                self._recorder.record({"event": "agreed", "step": machine.lead.step, "lines": lines})
                self._lead_recorder.go_on_from(machine.lead, later or ())
            server = self._serve(machine)
            if later is not None and machine.coordinator is not None:
                for worker in machine.coordinator.workers:  # what the earlier workers held is handed out again
                    server.forget(worker)
        store = self._listen()
        if self._shared is not None:
            store.set(MEMORY_KEY, self._shared.address)
        return int(store.port)

    def _load_residuals(self, machine: Machine, loaded: Loaded, attempt: int) -> None:
        """Load the state that the workers' compressors had at the checkpoint; the lead warns if it is left out."""
        settings = self._settings
        taken = False
        source = loaded.streams().exchange if loaded.state.get(RESIDUALS) == cut_of(settings) else None
        if source is not None and machine.residuals is not None:
            described, tensors = source
            names = [name for name, *_ in described]
            saved = of_file(zip(names, tensors, strict=True), self._rank % self._central.shards)
            taken = machine.residuals.begin(saved, settings.layout.data if attempt == 0 else None)
        if not taken and machine.coordinator is not None and (text := dropped_residuals(loaded.state)):
            self._recorder.record({"event": "warning", "step": int(loaded.state["position"]["step"]), "text": text})

    def _restore(self, machine: Machine, step: int) -> list[dict[str, Any]] | None:
        """Give the machine the state that the shard's server had when it was lost, if that is on disk.

        Returns:
            The coordinator's events since `step`, as far as the log has them; None if the shard has no log.

        Raises:
            CheckpointError: the log ends before `step`, the step of the checkpoint that the others begin with.
        """
        directory = self._log_directory
        if directory is None or not holds_snapshot(directory):
            return None
        later: list[dict[str, Any]] = []
        listener = machine.listener
        # A log may begin long before the checkpoint, which has the lines up to its own step.
        machine.listener = lambda event: later.append(event) if machine.lead.step > step else None
        restore(directory, machine)
        machine.listener = listener
        if machine.shard.needs(step) or (machine.coordinator is not None and machine.coordinator.step < step):
            raise CheckpointError(
                f"The log of updates in {directory} ends before the checkpoint of step {step}: it is "
                "not the last one of its shard. The run directory must be one that all nodes share; --resume goes on "
                "from the checkpoint."
            )
        return later

    @property
    def _log_directory(self) -> Path | None:
        """Directory of this shard's log, whichever server serves the shard: only one does at a time. None: no log is
        kept.
        """
        if not self._central.persist or self._settings.model_directory is None:
            return None
        return Path(self._settings.model_directory).parent / "servers" / str(self._rank % self._central.shards)

    def _serve(self, machine: Machine) -> ShardServer:
        make = RootServer if self._central.num_leaves else ShardServer
        self._server = server = make(machine) if self._shared is None else HogwildServer(machine, self._shared)
        if (directory := self._log_directory) is not None:
            server.follow(DiskLog(directory))
        if self._lead_recorder is not None:
            server.run_state = self._lead_recorder.checkpoint_state
            self._lead_recorder.open(server, self._started_at)
        return server

    def replicate(self, copy: Address) -> None:
        """Have a copy of this server follow it from now on; return once the copy has the present state."""
        assert self._server is not None
        channel = dial(copy, f"parameter server {self._rank}", copy.name)
        self._channels.append(channel)
        self._to_copies.append(channel)
        self._server.follow(Replicator(channel))

    def promote(self) -> int:
        """Serve instead of the lost server whose copy this is; return the port, like `begin`."""
        assert self._backup is not None
        assert self._store is not None
        backup, self._backup = self._backup, None
        machine = backup.promote()
        self._recorder.drain(0.0)  # the lost server sent these lines; `lines_since` has the missing ones
        if self._lead_recorder is not None:
            self._lead_recorder.go_on_from(machine.lead)
        self._serve(machine)
        return int(self._store.port)

    def _machine(self, model: torch.nn.Module, optimizer_state: Any, position: dict[str, Any]) -> Machine:
        settings, central = self._settings, self._central
        index = self._rank % central.shards
        leads = index == 0
        slices, values, buffers = self._part(model, index)
        step = int(position.get("step", 0))
        train, validation = self._open("train"), self._open("validation")
        refuse_without_validation(settings.validation_goals, validation.num_rows)
        if leads:
            warn_of_shared_rows(train, validation)
        plan = central.coordinator_settings(settings, train.num_rows, validation.num_rows, position)
        coordinator = Coordinator(plan) if leads else None
        self._lead_recorder = LeadRecorder(settings, plan, position, self._recorder) if leads else None
        optimizer = make_optimizer(**settings.optimizer)
        optimizer.prepare(model, {piece.name for piece in slices})
        if optimizer.mixes_parameters and (central.shards > 1 or self._plan is not None):
            raise ConfigError(
                f"config: train.optimizer.type: {settings.optimizer['type']} moves a parameter by the gradients of "
                "others as well, and here no server has all of them; use strategy.exchange.shards: 1, or another "
                "optimizer"
            )
        if central.in_shared_memory:
            self._shared = share(settings, model, optimizer, Buffers.of(model))
            values, buffers = self._shared.values, None if buffers is None else self._shared.buffers
        shard = Shard(
            slices,
            values,
            optimizer,
            Rates(settings.optimizer["lr"], settings.lr_schedule, plan.last_step),
            consistency=central.consistency,
            scale_by_staleness=central.scale_by_staleness,
            grad_clip=settings.grad_clip,
            version=step,
            buffers=buffers,
            aggregation=self._rule(),
            revision=Revision(step, central.global_lr) if central.decouples_rates else None,
            notes_changes=central.pulls_changes,
            pushes_per_update=central.pushes_per_update(settings),
        )
        if optimizer_state:
            if self._plan is not None:
                stage = index // (central.shards // self._plan.num_workers)
                optimizer_state = cut_slots(optimizer_state, self._plan.ranges_of(stage))
            shard.load_optimizer(slots_of_shard(slices, optimizer_state))
        is_reached = None if self._lead_recorder is None else self._lead_recorder.is_reached
        if self._shared is not None:
            self._shared.share_state(optimizer, [piece.key for piece in slices], fill=True)
            return OrderingMachine(shard, coordinator, is_reached=is_reached)
        make = RootMachine if central.num_leaves else Machine
        return make(shard, coordinator, compressor_of(settings, 0), is_reached=is_reached)

    def _part(self, model: torch.nn.Module, index: int) -> tuple[list[Slice], Tensor, Buffers | None]:
        """Return a shard's slices of parameters, copies of their values, and the buffers if this shard holds them.

        The shards of a stage follow each other; the first of them keeps the stage's buffers.
        """
        shards, plan, unit = self._central.shards, self._plan, self._central.unit
        if plan is None:
            partition = Partition.of(model, shards, unit=unit)
            buffers, values = held_buffers(model) if index == 0 else None, flatten_parameters(model)
        else:
            stage, index = divmod(index, shards // plan.num_workers)
            ranges = plan.ranges_of(stage)
            partition, values = part_of_stage(model, plan.parameters[stage], shards // plan.num_workers, ranges, unit)
            buffers = buffers_of_stage(model, plan.buffers[stage], ranges) if index == 0 else None
        first, last = partition.bounds[index]
        return partition.slices(index), values[first:last].clone(), buffers

    def _rule(self) -> Aggregation | None:
        """Return the rule that combines a batch's gradients; None: they are summed."""
        section = self._settings.aggregation
        return None if section.get("type", "mean") == "mean" else make_aggregation(**section)

    def _open(self, split: str) -> Source:
        return open_split(self._task, split, num_endless=self._settings.num_endless)

    def outcome(self) -> Outcome:
        """Return how the run ended; lead only."""
        assert self._lead_recorder is not None
        assert self._server is not None
        self._lead_recorder.close()
        self._server.events.deliver(wait=True)
        coordinator = self._server.machine.lead
        ended = coordinator.ended
        reason = "interrupted" if ended is None else ended.reason
        outcome = self._lead_recorder.outcome(reason, coordinator.progress.staleness)
        outcome.summary |= {} if self._shared is None else self._shared.update_counts()
        return outcome

    # -- beside it, from the driver ------------------------------------------------------------------------

    def accept(self, worker: int, name: str) -> None:
        """Expect a worker under this name, and serve it in a thread of its own."""
        assert self._server is not None
        self._meet(name, f"worker {worker}" if worker >= 0 else f"leaf server {-1 - worker}", self._server.serve)

    def follow(self, name: str) -> None:
        """Expect the server that this one is a copy of, and follow it in a thread of its own."""
        assert self._backup is not None
        self._meet(name, f"parameter server {self._rank % self._central.shards}", self._backup.follow)

    def call_off(self, meeting: str) -> None:
        """Have the stages that connect to each other here stop waiting for one that is lost."""
        if (store := self._store) is not None:
            dist.PrefixStore(meeting, store).compare_set(COMPLETE_KEY, "", "no")

    def expel(self, worker: int) -> None:
        """Remove a worker that is lost for good; lead only."""
        if self._server is not None and self._lead_recorder is not None:
            self._server.forget(worker)

    def describe(self) -> dict[str, int]:
        """Return the sizes that the display shows; lead only."""
        assert self._lead_recorder is not None
        return self._lead_recorder.sizes()

    def drain(self, timeout_s: float, min_interval_s: float, written_step: int) -> list[dict[str, Any]]:
        """Return metric lines and events since the last call; same arguments as for `ReplicaHost.drain`."""
        if self._lead_recorder is not None:
            self._lead_recorder.written_step = written_step
        return self._recorder.drain(timeout_s, min_interval_s)

    def lines_since(self, step: int) -> list[dict[str, Any]]:
        """Return the metric lines after `step`."""
        return [line for line in self._recorder.since(step) if "event" not in line]

    def request_stop(self) -> None:
        """Request the end of the run, after the steps that have begun and with a checkpoint."""
        if self._server is not None and self._lead_recorder is not None:
            self._server.request_stop("interrupted")

    def dismiss(self, worker: int) -> None:
        """Have a worker leave once it has handed over its compressors' state."""
        if self._server is not None and self._lead_recorder is not None:
            self._server.dismiss(worker)

    def resize(self, num_workers: int) -> None:
        """Cut later batches into shares for `num_workers` workers."""
        if self._server is not None and self._lead_recorder is not None:
            self._server.resize(max(1, num_workers - self._central.backup_workers))

    def usage(self) -> dict[str, Any]:
        """Return the bytes that went through this server, both ways, and the peak of its memory.

        And `replicated_bytes`, those of them that it has sent to its copies, if it has had any.
        """
        used = {
            "bytes": self._bytes_moved(),
            "memory": peak_memory_bytes(torch.device("cpu")),
            "parts": parts_of(self),
            "reports": reports_of(self),
        }
        if self._to_copies:
            used["replicated_bytes"] = sum(channel.bytes_sent for channel in self._to_copies)
        return used

    def abort(self) -> None:
        """End every connection, and with it every wait."""
        for channel in list(self._channels):
            channel.close()

    def close(self) -> None:
        """End the server and every connection."""
        if self._lead_recorder is not None:
            self._lead_recorder.close()
        if self._server is not None:
            self._server.close()
        self._expect_nobody()
        self._hang_up()
        if self._shared is not None:
            self._shared.close()
        self._server = self._backup = self._shared = None
