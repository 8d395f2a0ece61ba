"""Workers on GPUs under parameter servers: nothing of NCCL joins worker and server, and no order makes either wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from orchestray.platform.comm import collective, process_groups
from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.comm.process_groups import Backend
from orchestray.platform.run.model_files import load_model_tensors
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.ps.protocol.address import Address
from orchestray.trainers.ps.variants.model_parallel import host as stage_host
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
    """Train one replica's workers on GPUs of the checker, with real servers beside them.

    One replica never waits for another by way of its servers. So these answer at once, outside of virtual time.
    """
    settings = replace(settings, model_directory=str(directory))
    hosts = Hosts(few_digits, settings)
    gpus = Gpus(seed, room=(None, 1)[seed % 2])
    ranks = range(settings.layout.size)

    def meet(_: Address, stage: int, num_stages: int, __: Backend) -> GpuCollective:
        assert num_stages == len(ranks)
        return GpuCollective(gpus, ranks, stage)

    def work(rank: int) -> Callable[[], None]:
        def program() -> None:
            assert hosts.train(rank, "first") == "finished"
            hosts.stages[rank].save_model(int(settings.steps or 0))

        return program

    try:
        for rank in ranks:
            gpus.start_member(rank, work(rank))
        with mock.patch.object(stage_host, "meet", meet), in_virtual_time(gpus), no_group_is_made():
            gpus.run()
        return load_model_tensors(str(directory)), gpus
    finally:
        hosts.close()


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
        assert {member for known in gpus.communicators.values() for member in known.members} <= set(
            range(settings.layout.size)
        )
        assert not [known for known in gpus.communicators if " " in known], "no communicator of a pair"
        assert len(gpus.communicators) <= 1 + 2 * settings.layout.size, "one for each group of the layout"


def test_workers_of_a_replica_on_gpus_meet_over_host_memory() -> None:
    settings = staged_settings(LAYOUTS["pipeline"], steps=1)
    hosts = Hosts(few_digits, settings)
    asked: list[str] = []

    def meet(_: Address, __: int, ___: int, backend: Backend) -> Any:
        asked.append(backend.kind)
        raise PeerLostError("noted")

    try:
        hosts.stages[0]._device = torch.device("cuda", 0)
        with mock.patch.object(stage_host, "meet", meet):
            assert hosts.train(0, "first") == "peer_lost"
    finally:
        hosts.close()
    assert asked == ["over_host"]
