"""One config runs under each mixture of who adds up, how long they wait, and what is divided: one section differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import orchestray
from orchestray.platform.actors.pool import make_room
from orchestray.trainers.config.load import load_train_config
from support import ddp_peer
from support.forked import Forked
from support.training import furthest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

CONFIG = Path(__file__).parents[2] / "configs" / "train" / "digits-single.yaml"
SHORT = ("train.epochs=1", "train.optimizer.lr=0.05")
LEARNS = 0.8
"""Accuracy that each reaches in this time, of ten classes."""
DATA, PIPELINE, TENSOR = "{data: 2}", "{pipeline: 2, microbatches: 2}", "{tensor: 2}"
SERVER = "type: parameter_server"
SYNCHRONOUS = {
    "all-reduce": (DATA, "{type: allreduce}"),
    "servers, synchronous": (DATA, f"{{{SERVER}, consistency: synchronous}}"),
    "stages": (PIPELINE, "{type: allreduce}"),
    "parts of layers": (TENSOR, "{type: allreduce}"),
    "parts of layers in two replicas": ("{data: 2, tensor: 2}", "{type: allreduce}"),
}
NOT_SYNCHRONOUS = {
    "servers, stale": (DATA, f"{{{SERVER}, consistency: stale, staleness: 2}}"),
    "servers, asynchronous": (DATA, f"{{{SERVER}, consistency: asynchronous}}"),
    "averaged now and then": (DATA, "{type: averaging, every: 8}"),
    "gossip": (DATA, "{type: gossip}"),
    "gossip, asynchronous": (DATA, "{type: gossip, consistency: asynchronous}"),
    "stages, asynchronous": ("{pipeline: 2, microbatches: 2, schedule: pipedream}", "{type: allreduce}"),
    "parts of layers, under asynchronous servers": (
        "{data: 2, tensor: 2}",
        f"{{{SERVER}, consistency: asynchronous, shards: 2}}",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    make_room(cluster)
    yield
    make_room(cluster)


def overrides(network: str, exchange: str) -> list[str]:
    return [*SHORT, f"strategy.network={network}", f"strategy.exchange={exchange}"]


def trained(folder: Path, *changes: str) -> Any:
    return orchestray.train(CONFIG, overrides=changes, runs_dir=folder)


@pytest.fixture(scope="module")
def alone(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights of the single process."""
    weights: dict[str, torch.Tensor] = trained(tmp_path_factory.mktemp("alone"), *SHORT).load_model().state_dict()
    return weights


@pytest.mark.parametrize(("network", "exchange"), SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_a_synchronous_scheme_comes_to_the_weights_of_the_single_process(
    alone: dict[str, torch.Tensor], tmp_path: Path, network: str, exchange: str
) -> None:
    run = trained(tmp_path, *overrides(network, exchange))
    assert run.result["status"] == "succeeded"
    weights = run.load_model().state_dict()
    for name, weight in alone.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)


def test_workers_of_ray_come_to_the_weights_of_distributed_data_parallel_of_torch_in_buckets(
    cluster: Cluster, tmp_path: Path
) -> None:
    strategy = {"network": {"data": 2}, "exchange": {"type": "allreduce", "bucket_mb": 0.02}}
    config = {"name": "ours", "task": {"type": "digits"}, "train": ddp_peer.OPTIONS, "strategy": strategy}
    run = orchestray.train(config, runs_dir=tmp_path)
    assert len(run.result["workers"]) == 2
    assert run.result["exchange"]["buckets"] > 1
    with Forked(Path(ddp_peer.__file__), str(tmp_path), "digits") as peers:
        assert peers.wait() == 0, peers.printed()
    for rank in range(2):
        assert furthest(load_file(tmp_path / f"rank-{rank}.safetensors"), run.load_model().state_dict()) <= 1e-12


@pytest.mark.parametrize(("network", "exchange"), NOT_SYNCHRONOUS.values(), ids=NOT_SYNCHRONOUS)
def test_a_scheme_that_does_not_wait_learns_from_the_same_config(
    cluster: Cluster, tmp_path: Path, network: str, exchange: str
) -> None:
    # After as many epochs as the others some are at 0.79: how stale they are depends on the machine.
    run = trained(tmp_path, *overrides(network, exchange), "train.epochs=8")
    assert run.result["final"]["validation"]["accuracy"] > LEARNS
    assert (run.result["staleness"] is not None) == ("parameter_server" in exchange or "pipedream" in network)


def test_each_differs_from_the_others_in_one_section_of_the_config() -> None:
    one = load_train_config(CONFIG, overrides=[*SHORT])
    found = set()
    for network, exchange in (*SYNCHRONOUS.values(), *NOT_SYNCHRONOUS.values()):
        other = load_train_config(CONFIG, overrides=overrides(network, exchange))
        assert [key for key in type(one).model_fields if getattr(one, key) != getattr(other, key)] == ["strategy"]
        found.add(str(other.strategy))
    assert len(found) == len(SYNCHRONOUS) + len(NOT_SYNCHRONOUS)
