"""The process of a stage of a replica under parameter servers, as a member of the gang of workers.

The stages of a replica connect to each other at the lead server's store, again each time one of them is lost. The
driver cancels a meeting if one of them will not come.
"""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import TCPStore  # torch.distributed.TCPStore, where type checkers find it
from torch.distributed.distributed_c10d import PrefixStore

from orchestray.platform.actors.member import pin_gloo_interface
from orchestray.platform.comm.backend import backend_of_stages
from orchestray.platform.comm.channel.gloo import address_towards
from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.process_groups import GLOO, Backend
from orchestray.platform.process.pulse import PULSE
from orchestray.platform.process.sockets import listens
from orchestray.trainers.core.faults import Faults
from orchestray.trainers.ps.protocol.address import COMPLETE_KEY, Address, StagePlan
from orchestray.trainers.ps.protocol.settings import CentralSettings
from orchestray.trainers.ps.variants.model_parallel.plan import plan_stages
from orchestray.trainers.ps.variants.model_parallel.worker import StagedWorker
from orchestray.trainers.ps.worker.worker_process import EmployedHost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestray.platform.comm.channel.base import Channel
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.ps.protocol.residuals import Kept

_CONNECT_TIMEOUT_S = 60.0
_MEET_TIMEOUT_S = 600.0
"""Seconds; longer than a server's timeout, because the other stages may have to start a process first."""

_COUNTED = ("shares", "samples", "busy_s", "waited_s", "bytes", "saved_bytes")


class StageHost(EmployedHost):
    """A host that builds task and data once, and its part of the network each time its replica meets."""

    def __init__(self, settings: ReplicaSettings) -> None:
        super().__init__(settings)
        self._source("train")
        self._worker: StagedWorker | None = None
        self._world: Collective | None = None
        self._meeting = self._called_off = ""
        self._rank = -1
        self._earlier: dict[str, float] = dict.fromkeys(_COUNTED, 0)
        """Totals of the workers of earlier meetings."""
        self._kept: tuple[int, Kept | None] = (-1, None)
        """Number of this worker, and the state of its compressors then."""

    def plan(self) -> StagePlan:
        """Decide where the network is cut; see `plan_stages`."""
        return plan_stages(self._task, self._settings, self._stream, self._device)

    def train(self, rank: int, attempt: int, servers: list[Address], meeting: Address, plan: StagePlan) -> str:
        """Work with the other stages until the lead has nothing more to do.

        Args:
            rank: rank of this process among all workers; those of a replica follow each other, in the order of stages.
            attempt: number of times it was killed on purpose before, see `FaultPlan.of`.
            servers: servers of this stage, in the order of shards.
            meeting: store and name with which the replica's stages meet.
            plan: plan of all stages.

        Returns:
            The reason of the end, `PEER_LOST` or `SERVER_LOST`.
        """
        self._dissolve()
        kept = self._kept[1] if self._kept[0] == rank else None
        self._rank = rank
        replica, stage = divmod(rank, plan.num_workers)
        with self._closing:
            self._number, self._aborted, self._meeting = replica, False, meeting.name

        def work(channels: list[Channel], faults: Faults) -> str:
            # The servers come first: they wait for a shorter time than the stages wait for each other.
            backend = Backend(backend_of_stages(on_gpus=self._settings.gpus > 0))
            world = self._enter(meet(meeting, stage, plan.num_workers, backend))
            central = CentralSettings.of(self._settings)
            worker = self._worker = StagedWorker(
                self._task,
                self._settings,
                self._stream,
                self._source("train"),
                world,
                num_shards=len(servers),
                unit=central.unit,
                factors=central.factors,
                bounds=list(plan.bounds),
                device=self._device,
            )
            return worker.run(
                channels,
                replica,
                writer=self._prepare_checkpoints() if worker.is_first else None,
                faults=faults,
                replace_server=self._await_server if self._settings.exchange["replicas"] > 1 else None,
                kept=kept,
            )

        return self._employ(rank, attempt, servers, work)

    def save_model(self, step: int) -> None:
        """Write the trained model, as the servers hold it after `step`, to the run's directory. All stages must call
        it.
        """
        worker = self._worker
        assert worker is not None
        if self._settings.model_directory:
            trained = worker.trained_model(step)
            if worker.is_first:
                self._write_model(trained)

    # -- beside it, from the driver ------------------------------------------------------------------------

    def _counts(self) -> Mapping[str, float]:
        present = {} if self._worker is None else self._worker.counts()
        return {name: count + present.get(name, 0) for name, count in self._earlier.items()}

    def abort(self) -> None:
        """End every wait for the servers and for the other stages."""
        super().abort()
        with self._closing:
            world = self._world
        if world is not None:
            world.abort()

    def call_off(self, meeting: str) -> None:
        """Cancel a meeting of which another stage is lost."""
        with self._closing:
            self._called_off = meeting
            is_there = self._meeting == meeting
        if is_there:
            self.abort()

    def close(self) -> None:
        """Close the connections to the other stages and the servers, and the checkpoint writer."""
        self._dissolve()
        super().close()

    def _enter(self, world: Collective) -> Collective:
        """Register the group of the stages, which `abort` ends from now on."""
        with self._closing:
            self._world = world
            called_off = self._aborted or self._leaves or self._called_off == self._meeting
        if called_off:
            world.abort()
            raise PeerLostError("The meeting of the stages was called off.")
        return world

    def _dissolve(self) -> None:
        """Leave the other stages and the servers, and keep the counts and the compressors' state."""
        self._earlier = dict(self._counts())
        worker, self._worker = self._worker, None
        with self._closing:
            world, self._world = self._world, None
        if worker is not None:
            self._kept = self._rank, worker.kept
            worker.close()
        if world is not None:
            world.abort()
        super()._dissolve()


def meet(meeting: Address, stage: int, num_stages: int, backend: Backend = GLOO) -> Collective:
    """Connect to the other stages of a replica; return their group once all have come.

    Args:
        meeting: store in which they meet, and a name that was never used before.
        stage: stage of this process.
        num_stages: number of stages that are to come.
        backend: backend of their group.

    Raises:
        PeerLostError: one of them will not come, or did not in time.
    """
    host, port = meeting.host, meeting.port
    if not listens(host, port, _CONNECT_TIMEOUT_S):
        raise PeerLostError(f"Stage {stage} of {num_stages} found nobody at {host}:{port}, where all were to meet.")
    try:
        served = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CONNECT_TIMEOUT_S))
        store = PrefixStore(meeting.name, served)
        if store.add("arrived", 1) == num_stages:
            store.compare_set(COMPLETE_KEY, "", "yes")
        with PULSE.waiting():
            store.wait([COMPLETE_KEY], timedelta(seconds=_MEET_TIMEOUT_S))
        complete = store.get(COMPLETE_KEY).decode() == "yes"
    except RuntimeError as error:
        raise PeerLostError(f"Stage {stage} of {num_stages} did not meet the others: {error}") from error
    if not complete:
        raise PeerLostError(f"Stage {stage} of {num_stages} did not meet the others: one of them was lost.")
    address = address_towards(host, port)
    if address is not None and not ipaddress.ip_address(address).is_loopback:
        pin_gloo_interface(address)
    # All have come: one that does not connect now has died since.
    group = PrefixStore("group", store)
    return Collective.gloo(group, stage, num_stages, connect_timeout_s=_CONNECT_TIMEOUT_S, backend=backend)
