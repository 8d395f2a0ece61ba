"""Workers on GPUs under parameter servers: nothing of NCCL joins worker and server, and no order makes either wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from orchestray.platform.comm import collective, process_groups
from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.comm.process_groups import Backend
from orchestray.platform.run.model_files import load_model_tensors
from orchestray.platform.sim.event_loop import DeadlockError
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.ps.protocol.address import Address
from orchestray.trainers.ps.variants.model_parallel import host as stage_host
from support.beside_servers import GpusBesideServers, beside_servers
from support.central_run import central_settings, train_central
from support.nccl import GpuCollective, Gpus, in_virtual_time
from support.staged_run import Hosts, staged_settings
from support.training import few_digits, same_bits

CONSISTENCIES = ["synchronous", "asynchronous"]
LAYOUTS = {
    "tensor": {"tensor": 2, "microbatches": 1},
    "pipeline": {"pipeline": 2},
    "both": {"pipeline": 2, "tensor": 2},
}
SEVERAL = {
    "two of tensor groups": {"data": 2, "tensor": 2, "microbatches": 1},
    "three of stages": {"data": 3, "pipeline": 2},
    "two of both": {"data": 2, "pipeline": 2, "tensor": 2},
}


@contextlib.contextmanager
def no_group_is_made() -> Iterator[None]:
    """Fail if worker or server makes a process group of torch: what the checker knows of is all there is."""
    refused = AssertionError("a process group that others must join")
    with (
        mock.patch.object(collective, "connect", side_effect=refused),
        mock.patch.object(process_groups, "connect", side_effect=refused),
        mock.patch.object(dist, "init_process_group", side_effect=refused),
        mock.patch.object(dist, "new_group", side_effect=refused),
    ):
        yield


@pytest.mark.parametrize("consistency", [*CONSISTENCIES, "stale"])
def test_a_worker_and_a_server_join_no_process_group(consistency: str, tmp_path: Path) -> None:
    given = {"consistency": consistency, **({"staleness": 1} if consistency == "stale" else {})}
    with no_group_is_made():
        found = train_central(few_digits, central_settings(2, given, steps=2), tmp_path)
    assert found.outcome.step == 2


def trained(settings: ReplicaSettings, seed: int, directory: Path) -> tuple[dict[str, Tensor], Gpus]:
    """Train the workers of all replicas on GPUs of the checker, with real servers beside them."""
    settings = replace(settings, model_directory=str(directory))
    hosts = Hosts(few_digits, settings)
    gpus = GpusBesideServers(seed, room=(None, 1)[seed % 2])
    size = settings.layout.model_size

    def meet(meeting: Address, stage: int, num_stages: int, _: Backend) -> GpuCollective:
        assert num_stages == size
        replica = meeting.name.rpartition("-")[2]
        first = int(replica) * size
        return GpuCollective(gpus, range(first, first + size), first + stage, path=f"replica-{replica}")

    def work(rank: int) -> Callable[[], None]:
        def program() -> None:
            assert hosts.train(rank, "first") == "finished"
            if rank < size:  # the first replica writes the model
                hosts.stages[rank].save_model(int(settings.steps or 0))

        return program

    try:
        for rank in range(settings.layout.size):
            gpus.start_member(rank, work(rank))
        joined = mock.patch.object(stage_host, "meet", meet)
        with joined, in_virtual_time(gpus), beside_servers(gpus), no_group_is_made():
            gpus.run()
        return load_model_tensors(str(directory)), gpus
    finally:
        hosts.close()


def assert_groups_are_of_replicas_alone(gpus: Gpus, settings: ReplicaSettings) -> None:
    """Check that workers have communicators with the others of their replica alone, one for each group."""
    size = settings.layout.model_size
    for known in gpus.communicators.values():
        assert len({member // size for member in known.members}) == 1, known.name
    assert {member for known in gpus.communicators.values() for member in known.members} <= {
        *range(settings.layout.size)
    }
    assert not [known for known in gpus.communicators if " " in known], "no communicator of a pair"
    assert len(gpus.communicators) <= settings.layout.data * (1 + 2 * size), "one for each group of the layout"


@pytest.mark.parametrize("num_seeds", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("consistency", CONSISTENCIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_workers_of_a_replica_with_servers_beside_train_to_the_same_bits_in_any_order(
    name: str, consistency: str, num_seeds: int, tmp_path: Path
) -> None:
    settings = staged_settings(LAYOUTS[name], {"consistency": consistency}, steps=2)
    first: dict[str, Tensor] = {}
    for seed in range(num_seeds):
        found, gpus = trained(settings, seed, tmp_path / f"model-{seed}")
        first = first or found
        assert same_bits(found, first), seed
        assert_groups_are_of_replicas_alone(gpus, settings)


@pytest.mark.parametrize(
    ("name", "consistency", "num_seeds"),
    [
        ("two of tensor groups", "stale", 2),
        ("three of stages", "synchronous", 2),
        ("two of both", "asynchronous", 1),
        *(
            pytest.param(name, consistency, 24, marks=pytest.mark.slow)
            for name in SEVERAL
            for consistency in (*CONSISTENCIES, "stale")
        ),
    ],
)
def test_replicas_that_meet_at_their_servers_alone_never_stand_still(
    name: str, consistency: str, num_seeds: int, tmp_path: Path
) -> None:
    """Only where all wait for each step of all do bits not depend on who comes first."""
    given = {"consistency": consistency, **({"staleness": 1} if consistency == "stale" else {})}
    settings = staged_settings(SEVERAL[name], given, steps=2)
    first: dict[str, Tensor] = {}
    for seed in range(num_seeds):
        found, gpus = trained(settings, seed, tmp_path / f"model-{seed}")
        first = first or found
        if consistency == "synchronous":
            assert same_bits(found, first), seed
        assert all(bool(tensor.isfinite().all()) for tensor in found.values())
        assert_groups_are_of_replicas_alone(gpus, settings)


def test_a_member_that_waits_for_a_server_lets_those_go_on_for_whom_the_server_waits() -> None:
    gpus, answer = GpusBesideServers(), Future[None]()

    def asks() -> None:
        gpus.wait_outside(answer)
        assert answer.done()

    gpus.start_member(0, asks)
    gpus.start_member(1, lambda: answer.set_result(None))
    gpus.run()


def test_a_server_that_waits_for_a_member_that_waits_for_another_is_a_deadlock() -> None:
    gpus, answer = GpusBesideServers(answered_s=0.01), Future[None]()

    def asks_first() -> None:
        world = GpuCollective(gpus, range(2), 0)
        gpus.wait_outside(answer)
        world.barrier()

    def asks_later() -> None:
        GpuCollective(gpus, range(2), 1).barrier()
        answer.set_result(None)

    gpus.start_member(0, asks_first)
    gpus.start_member(1, asks_later)
    with pytest.raises(DeadlockError, match="member 1 of group: barrier"):
        gpus.run()


def test_workers_of_a_replica_on_gpus_meet_over_host_memory() -> None:
    settings = staged_settings(LAYOUTS["pipeline"], steps=1)
    hosts = Hosts(few_digits, settings)
    asked: list[str] = []

    def meet(_: Address, __: int, ___: int, backend: Backend) -> Any:
        asked.append(backend.kind)
        raise PeerLostError("noted")

    try:
        hosts.stages[0]._settings = replace(settings, gpus=1.0)
        with mock.patch.object(stage_host, "meet", meet):
            assert hosts.train(0, "first") == "peer_lost"
    finally:
        hosts.close()
    assert asked == ["over_host"]
