"""A parameter server's process: what a member of the gang of servers hosts."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from orchestray.platform.channel.base import ChannelError
from orchestray.platform.channel.nearest import connect
from orchestray.platform.data.source import open_source, reading
from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.recorder import Recorder
from orchestray.trainers import tasks
from orchestray.trainers.aggregation import Aggregation, make_aggregation
from orchestray.trainers.central.address import COMPLETE_KEY, MEMORY_KEY, Address, StagePlan
from orchestray.trainers.central.buffers import Buffers
from orchestray.trainers.central.hogwild_server import LedgerServer, OrderingMachine, share, share_state
from orchestray.trainers.central.ledger import Ledger
from orchestray.trainers.central.machine import Machine
from orchestray.trainers.central.minutes import Minutes
from orchestray.trainers.central.partition import Partition, Slice, flatten_parameters
from orchestray.trainers.central.persistence import DiskLog, holds_snapshot, restore
from orchestray.trainers.central.replication import Backup, Replicator
from orchestray.trainers.central.residuals import cut_of, of_file
from orchestray.trainers.central.revision import Revision
from orchestray.trainers.central.root import RootMachine, RootServer
from orchestray.trainers.central.server import ShardServer
from orchestray.trainers.central.settings import CentralSettings
from orchestray.trainers.central.shard import Rates, Shard
from orchestray.trainers.central.stage_parts import cut_slots
from orchestray.trainers.central.stage_plan import buffers_of_stage, held_buffers, part_of_stage
from orchestray.trainers.central.state import slots_of_shard
from orchestray.trainers.checkpoint_source import newest
from orchestray.trainers.compression import make_compressor
from orchestray.trainers.consolidation.members import first_member
from orchestray.trainers.memory.process import peak_memory_bytes
from orchestray.trainers.optimizers import make_optimizer
from orchestray.trainers.replica.outcome import Outcome
from orchestray.trainers.replica.randomness import seed_everything
from orchestray.trainers.replica.residue import RESIDUALS, dropped_residue
from orchestray.trainers.weights import load_model_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from orchestray.platform.channel.base import Channel
    from orchestray.trainers.central.shared_values import SharedValues
    from orchestray.trainers.checkpoint_source import Loaded
    from orchestray.trainers.replica.settings import ReplicaSettings, Start

_CONNECT_TIMEOUT_S = 60.0


class ServerHost:
    """One copy of one shard; rank 0 leads."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._central = CentralSettings.of(settings)
        self._task = tasks.build(settings.task)
        self._recorder = Recorder()
        self._server: ShardServer | None = None
        self._backup: Backup | None = None
        self._minutes: Minutes | None = None
        self._store: dist.TCPStore | None = None
        self._shared: SharedValues | None = None
        self._plan: StagePlan | None = None
        self._rank, self._address, self._started_at = 0, "", 0.0
        self._threads: list[threading.Thread] = []
        self._channels: list[Channel] = []
        self._bytes_of_earlier = 0

    # -- in the working thread -----------------------------------------------------------------------------

    def begin(
        self, rank: int, start: Start, address: str, is_copy: bool | None = None, plan: StagePlan | None = None
    ) -> int:
        """Serve from the newest checkpoint, or from the start; returns the port where workers meet this server.

        Called again after a server without copies was lost.

        Args:
            rank: of this server.
            start: of the run.
            address: of this node, by which others reach it.
            is_copy: whether it follows another server at first; default: the first servers, one a shard, do not.
            plan: of replicas in stages, each of which has servers of its own; None: workers hold the whole network.

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
        model = self._task.build_model()
        if self._settings.precision == "float64":
            model = model.double()
        optimizer_state: Any = {}
        position: dict[str, Any] = {}
        if loaded is not None:
            tensors, optimizer_state = loaded.tensors()
            if loaded.state.get("members"):  # an ensemble's: its first member is the run's own seed
                tensors, optimizer_state = first_member(tensors), first_member(optimizer_state)
            load_model_tensors(model, tensors)
            position = dict(loaded.state["position"])
        machine = self._machine(model, optimizer_state, position)
        if loaded is not None:
            self._load_residuals(machine, loaded, start.attempt)
        self._started_at = start.started_at
        if self._minutes is not None:
            machine.listener = self._minutes.note
        if follows:
            self._backup = Backup(machine)
        else:
            step = int(position.get("step", 0))
            later = self._restore(machine, step) if start.attempt > 0 else None
            if self._minutes is not None:  # in the order of the steps
                lines = list(loaded.state.get("lines", [])) if loaded is not None else []
                self._recorder.record({"event": "agreed", "step": machine.lead.step, "lines": lines})
                self._minutes.go_on_from(machine.lead, later or ())
            self._serve(machine)
            if later is not None:
                self._server_forgets_everybody(machine)
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # noqa: S104 - workers of other nodes must reach it
        if self._shared is not None:
            self._store.set(MEMORY_KEY, self._shared.address)
        return int(self._store.port)

    def _load_residuals(self, machine: Machine, loaded: Loaded, attempt: int) -> None:
        """What the workers' compressors kept when the checkpoint was saved; the lead says so where it is left out."""
        settings = self._settings
        taken = False
        source = loaded.streams().exchange if loaded.state.get(RESIDUALS) == cut_of(settings) else None
        if source is not None and machine.residuals is not None:
            described, tensors = source
            names = [name for name, *_ in described]
            saved = of_file(zip(names, tensors, strict=True), self._rank % self._central.shards)
            taken = machine.residuals.begin(saved, settings.layout.data if attempt == 0 else None)
        if not taken and machine.ledger is not None and (text := dropped_residue(loaded.state)):
            self._recorder.record({"event": "warning", "step": int(loaded.state["position"]["step"]), "text": text})

    def _restore(self, machine: Machine, step: int) -> list[dict[str, Any]] | None:
        """Make the machine what the shard's server was when it was lost, if that is on disk.

        Returns:
            What the ledger has said since `step`, as far as the log tells; None: there is no log.

        Raises:
            CheckpointError: what is there is of before `step`, that of the checkpoint the others begin with.
        """
        directory = self._log_directory
        if directory is None or not holds_snapshot(directory):
            return None
        later: list[dict[str, Any]] = []
        listener = machine.listener
        # A log may begin long before the checkpoint, which tells of the steps up to its own.
        machine.listener = lambda event: later.append(event) if machine.lead.step > step else None
        restore(directory, machine)
        machine.listener = listener
        if machine.shard.needs(step) or (machine.ledger is not None and machine.ledger.step < step):
            raise CheckpointError(
                f"The log of updates in {directory} ends before the checkpoint of step {step}: it is "
                "not the last one of its shard. The run directory must be one that all nodes share; --resume goes on "
                "from the checkpoint."
            )
        return later

    def _server_forgets_everybody(self, machine: Machine) -> None:
        """The workers of before hold nothing any more: what they held is handed out again."""
        if machine.ledger is not None and self._server is not None:
            for worker in machine.ledger.workers:
                self._server.forget(worker)

    @property
    def _log_directory(self) -> Path | None:
        """Where this shard's log is, whichever server serves it: only one does at a time. None: it keeps none."""
        if not self._central.persist or self._settings.model_directory is None:
            return None
        return Path(self._settings.model_directory).parent / "servers" / str(self._rank % self._central.shards)

    def _serve(self, machine: Machine) -> None:
        make = RootServer if self._central.groups > 1 else ShardServer
        self._server = make(machine) if self._shared is None else LedgerServer(machine, self._shared)
        if (directory := self._log_directory) is not None:
            self._server.follow(DiskLog(directory))
        if self._minutes is not None:
            self._server.tell = self._minutes.told
            self._minutes.open(self._server, self._started_at)

    def replicate(self, copy: Address) -> None:
        """Have a copy of this server follow it from now on; returns when it has the present state to build on."""
        assert self._server is not None
        channel = connect(
            copy.host,
            copy.port,
            copy.name,
            1,
            name=f"parameter server {self._rank}",
            peer=copy.name,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )
        self._channels.append(channel)
        self._server.follow(Replicator(channel))

    def promote(self) -> int:
        """Serve in place of the lost server that this one is a copy of; returns what `begin` does."""
        assert self._backup is not None
        assert self._store is not None
        backup, self._backup = self._backup, None
        machine = backup.promote()
        self._recorder.drain(0.0)  # the lost server told of these; what it did not is asked for as copies
        if self._minutes is not None:
            self._minutes.go_on_from(machine.lead)
        self._serve(machine)
        return int(self._store.port)

    def _machine(self, model: torch.nn.Module, optimizer_state: Any, position: dict[str, Any]) -> Machine:
        settings, central = self._settings, self._central
        index = self._rank % central.shards
        leads = index == 0
        slices, values, buffers = self._part(model, index)
        step = int(position.get("step", 0))
        plan = central.ledger(settings, self._num_rows("train"), self._num_rows("validation"), step)
        ledger = Ledger(plan) if leads else None
        self._minutes = Minutes(settings, plan, position, self._recorder) if leads else None
        optimizer = make_optimizer(**{key: value for key, value in settings.optimizer.items() if key != "lr"})
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
        )
        if optimizer_state:
            if self._plan is not None:
                stage = index // (central.shards // self._plan.num_workers)
                optimizer_state = cut_slots(optimizer_state, self._plan.ranges_of(stage))
            shard.load_optimizer(slots_of_shard(slices, optimizer_state))
        if self._shared is not None:
            share_state(self._shared, optimizer, slices)
            return OrderingMachine(
                shard, ledger, is_reached=None if self._minutes is None else self._minutes.is_reached
            )
        decoder = None
        if settings.compression.get("type", "none") != "none":
            decoder = make_compressor(
                **settings.compression, seed=settings.seed, worker=0, num_workers=settings.layout.data
            )
        is_reached = None if self._minutes is None else self._minutes.is_reached
        make = RootMachine if central.groups > 1 else Machine
        return make(shard, ledger, decoder, is_reached=is_reached)

    def _part(self, model: torch.nn.Module, index: int) -> tuple[list[Slice], Tensor, Buffers | None]:
        """What the servers of a shard hold: slices of parameters, copies of their values, and buffers if they are its.

        The shards of a stage follow each other; the first of them keeps the stage's buffers.
        """
        shards, plan = self._central.shards, self._plan
        if plan is None:
            partition = Partition.of(model, shards)
            buffers, values = held_buffers(model) if index == 0 else None, flatten_parameters(model)
        else:
            stage, index = divmod(index, shards // plan.num_workers)
            ranges = plan.ranges_of(stage)
            partition, values = part_of_stage(model, plan.parameters[stage], shards // plan.num_workers, ranges)
            buffers = buffers_of_stage(model, plan.buffers[stage], ranges) if index == 0 else None
        first, last = partition.bounds[index]
        return partition.slices(index), values[first:last].clone(), buffers

    def _rule(self) -> Aggregation | None:
        """How a batch's gradients are combined; None: summed."""
        section = self._settings.aggregation
        return None if section.get("type", "mean") == "mean" else make_aggregation(**section)

    def _num_rows(self, split: str) -> int:
        with reading(f"the {split} data"):
            return open_source(self._task.dataset(split), split=split).num_rows

    def outcome(self) -> Outcome:
        """How it ended; of the lead."""
        assert self._minutes is not None
        assert self._server is not None
        self._minutes.close()
        ledger = self._server.machine.lead
        ended = ledger.ended
        outcome = self._minutes.outcome("interrupted" if ended is None else ended.reason, ledger.accounts.staleness)
        outcome.told |= {} if self._shared is None else self._shared.told()
        return outcome

    # -- beside it, from the driver ------------------------------------------------------------------------

    def accept(self, worker: int, name: str) -> None:
        """Expect a worker under this name; serves it in a thread of its own."""
        assert self._server is not None
        self._meet(name, f"worker {worker}" if worker >= 0 else f"leaf server {-1 - worker}", self._server.serve)

    def follow(self, name: str) -> None:
        """Expect the server that this one is a copy of; keeps up with it in a thread of its own."""
        assert self._backup is not None
        self._meet(name, f"parameter server {self._rank % self._central.shards}", self._backup.follow)

    def call_off(self, meeting: str) -> None:
        """Stages that meet here shall not wait for one that is lost."""
        if (store := self._store) is not None:
            dist.PrefixStore(meeting, store).compare_set(COMPLETE_KEY, "", "no")

    def expel(self, worker: int) -> None:
        """A worker is lost for good; on the lead."""
        if self._server is not None and self._minutes is not None:
            self._server.forget(worker)

    def _meet(self, name: str, peer: str, serve: Callable[[Channel], object]) -> None:
        store = self._store
        assert store is not None

        def meet() -> None:
            with contextlib.suppress(ChannelError):  # it never came
                channel = connect(
                    self._address,
                    store.port,
                    name,
                    0,
                    name=f"parameter server {self._rank}",
                    peer=peer,
                    connect_timeout_s=_CONNECT_TIMEOUT_S,
                    local_host=self._address,
                )
                self._channels.append(channel)
                serve(channel)

        thread = threading.Thread(target=meet, name=f"serve {name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def describe(self) -> dict[str, int]:
        """Sizes for the display; of the lead."""
        assert self._minutes is not None
        return self._minutes.sizes()

    def drain(self, timeout_s: float, min_interval_s: float, written_step: int) -> list[dict[str, Any]]:
        """As `ReplicaHost.drain`."""
        if self._minutes is not None:
            self._minutes.written_step = written_step
        return self._recorder.drain(timeout_s, min_interval_s)

    def lines_since(self, step: int) -> list[dict[str, Any]]:
        """As `ReplicaHost.lines_since`."""
        return [line for line in self._recorder.since(step) if "event" not in line]

    def request_stop(self) -> None:
        """Ask for an end after the steps that have begun, with a checkpoint."""
        if self._server is not None and self._minutes is not None:
            self._server.request_stop("interrupted")

    def dismiss(self, worker: int) -> None:
        """Have a worker leave, once it has handed over what it keeps."""
        if self._server is not None and self._minutes is not None:
            self._server.dismiss(worker)

    def resize(self, num_workers: int) -> None:
        """Cut later batches into shares for so many workers."""
        if self._server is not None and self._minutes is not None:
            self._server.resize(max(1, num_workers - self._central.backup_workers))

    def usage(self) -> dict[str, int]:
        """Bytes that went through this server, both ways, and the peak of its memory."""
        moved = sum(channel.bytes_sent + channel.bytes_received for channel in self._channels)
        return {
            "bytes": self._bytes_of_earlier + moved,
            "memory": peak_memory_bytes(torch.device("cpu")),
        }

    def abort(self) -> None:
        """Give up whatever is waited for: every connection ends."""
        for channel in list(self._channels):
            channel.close()

    def close(self) -> None:
        """End every connection."""
        if self._minutes is not None:
            self._minutes.close()
        if self._server is not None:
            self._server.close()
        self.abort()
        for thread in self._threads:
            thread.join(_CONNECT_TIMEOUT_S)
        self._bytes_of_earlier = self.usage()["bytes"]
        self._threads, self._channels = [], []
        if self._shared is not None:
            self._shared.close()
        self._server = self._backup = self._store = self._shared = None
