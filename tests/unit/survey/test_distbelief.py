"""Group C: DistBelief, replicas in stages under servers of each stage (Dean et al. 2012, sections 3 and 4.1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.settings import PipelineSettings
from orchestray.trainers.core.outcome import PEER_LOST
from orchestray.trainers.ps.variants.model_parallel.plan import plan_stages
from support.central import run_all, spawn
from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.staged_run import Hosts, staged_settings, train_staged
from support.training import digits, furthest

TWO_BY_TWO = {"data": 2, "pipeline": 2}
SGD = {"type": "sgd", "lr": 0.1, "momentum": 0.9}


def task() -> Any:
    return digits(hidden=[16])


class _Normalised(type(digits())):  # type: ignore[misc]
    """A task of digits with running statistics in both stages."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Linear(12, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 10),
        )


class _Tied(type(digits())):  # type: ignore[misc]
    def build_model(self) -> nn.Module:
        first, last = nn.Linear(64, 64), nn.Linear(64, 64)
        last.weight = first.weight
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), last, nn.Linear(64, 10))


def test_distbelief_with_one_replica_is_the_single_process(tmp_path: Path) -> None:
    settings = staged_settings({"data": 1, "pipeline": 2}, {"consistency": "asynchronous"}, steps=4, optimizer=SGD)
    found = train_staged(task, settings, tmp_path)
    wanted = train_laid_out(task, layout_settings(steps=4, optimizer=SGD))
    assert furthest(found.weights, wanted.weights) <= 1e-12
    assert found.losses == pytest.approx(wanted.losses, rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("network", "optimizer"),
    [({"tensor": 2}, {"type": "adam", "lr": 0.01}), ({"tensor": 2, "pipeline": 2}, SGD)],
    ids=["tensor, adam", "tensor x pipeline, momentum"],
)
def test_a_replica_whose_layers_are_split_is_the_single_process(
    tmp_path: Path, network: dict[str, int], optimizer: dict[str, Any]
) -> None:
    settings = staged_settings({"data": 1, **network}, {"consistency": "asynchronous"}, steps=4, optimizer=optimizer)
    found = train_staged(task, settings, tmp_path)
    wanted = train_laid_out(task, layout_settings(steps=4, optimizer=optimizer))
    assert furthest(found.weights, wanted.weights) <= 1e-12
    assert found.losses == pytest.approx(wanted.losses, rel=0, abs=1e-12)


def test_lock_step_replicas_of_split_layers_are_the_single_process(tmp_path: Path) -> None:
    settings = staged_settings(
        {"data": 2, "tensor": 2}, {"consistency": "synchronous", "shards": 4}, steps=4, optimizer=SGD
    )
    found = train_staged(task, settings, tmp_path)
    assert furthest(found.weights, train_laid_out(task, layout_settings(steps=4, optimizer=SGD)).weights) <= 1e-12


def test_what_a_tensor_group_holds_alike_has_servers_once() -> None:
    settings = staged_settings({"data": 1, "tensor": 2}, steps=1)
    hosts = Hosts(task, settings)
    try:
        plan = hosts.plan
        model = task().build_model()
        held = sum(
            server._server.machine.shard.values.numel()  # type: ignore[union-attr]
            for server in hosts.servers
        )
        assert held == sum(parameter.numel() for parameter in model.parameters())
        assert set(plan.parameters[0]) | set(plan.parameters[1]) == {name for name, _ in model.named_parameters()}
        assert any(name not in plan.parameters[1] for name in plan.parameters[0])  # the bias after the split input
    finally:
        hosts.close()


def test_a_checkpoint_of_split_layers_is_the_plain_models_and_goes_on_under_any_scheme(tmp_path: Path) -> None:
    adam = {"type": "adam", "lr": 0.01}
    settings = staged_settings({"data": 1, "tensor": 2}, {"consistency": "asynchronous"}, steps=4, optimizer=adam)
    settings = replace(settings, checkpoint_every_steps=4, checkpoint_storage=str(tmp_path / "checkpoints"))
    train_staged(task, settings, tmp_path / "four")
    found = train_staged(task, replace(settings, steps=8), tmp_path / "eight")
    wanted = train_laid_out(task, layout_settings(steps=8, optimizer=adam))
    assert furthest(found.weights, wanted.weights) <= 1e-12


@pytest.mark.parametrize(
    "exchange",
    [{"consistency": "synchronous", "shards": 4}, {"consistency": "stale", "staleness": 0}],
    ids=["synchronous", "stale"],
)
def test_lock_step_replicas_in_stages_are_the_single_process(tmp_path: Path, exchange: dict[str, Any]) -> None:
    found = train_staged(task, staged_settings(TWO_BY_TWO, exchange, steps=4, optimizer=SGD), tmp_path)
    wanted = train_laid_out(task, layout_settings(steps=4, optimizer=SGD))
    assert furthest(found.weights, wanted.weights) <= 1e-12
    shares = [one["shares"] for one in found.workers]  # one replica may have been there before the other
    assert shares[::2] == shares[1::2]
    assert sum(shares) == 2 * 2 * 4


@pytest.mark.parametrize("partitions", ["pipeline", "tensor"])
def test_distbelief_of_two_replicas_in_two_partitions_reaches_the_loss_of_the_single_process(
    tmp_path: Path, partitions: str
) -> None:
    plain = {"steps": 30, "optimizer": {"type": "sgd", "lr": 0.6}, "batch_size": 48}
    settings = staged_settings({"data": 2, partitions: 2}, {"consistency": "asynchronous"}, **plain)
    assert settings.exchange["shards"] == 2
    found = train_staged(task, settings, tmp_path)
    wanted = train_laid_out(task, layout_settings(**plain))
    assert sum(found.losses[-10:]) <= 1.2 * sum(wanted.losses[-10:])
    assert sum(found.outcome.staleness.values()) == 2 * 30
    assert all(one["bytes"] > 0 for one in found.workers)  # activations and gradients pass between partitions
    assert len(found.workers) == 2 * 2


def test_each_stage_s_first_server_keeps_the_stage_s_running_statistics(tmp_path: Path) -> None:
    settings = staged_settings({"data": 1, "pipeline": 2}, {"shards": 4}, steps=3)
    found = train_staged(_Normalised, settings, tmp_path / "staged")
    (tmp_path / "whole").mkdir()
    wanted = train_central(_Normalised, central_settings(1, steps=3), tmp_path / "whole")
    assert "2.running_mean" in found.weights
    assert "5.running_mean" in found.weights
    assert furthest(found.weights, wanted.weights) <= 1e-12


def test_the_metric_lines_count_the_bytes_of_all_stages_and_between_them(tmp_path: Path) -> None:
    settings = staged_settings({"data": 1, "pipeline": 2}, {"consistency": "asynchronous"}, steps=5)
    found = train_staged(task, settings, tmp_path)
    parameters = 8 * sum(parameter.numel() for parameter in task().build_model().parameters())  # bytes, float64
    told = sum(line["bytes_sent"] for line in found.lines if "split" not in line)
    between = 2 * 24 * 16 * 8  # activations there and their gradients back: 24 samples, 16 values each
    assert 5 * (2 * parameters + between) < told < 5 * (2 * parameters + between) + 2 * parameters


def test_stages_compress_what_they_push(tmp_path: Path) -> None:
    settings = staged_settings({"data": 1, "pipeline": 2}, steps=8)
    coded = {"type": "float16", "rounding": "nearest", "error_feedback": False}
    found = train_staged(task, replace(settings, compression=coded), tmp_path)
    sent = 8 * sum(parameter.numel() for parameter in task().build_model().parameters()) * 8  # float64
    assert 0.7 * sent < sum(one["saved_bytes"] for one in found.workers) <= 0.75 * sent
    assert found.losses[-1] < found.losses[0]


def test_a_meeting_to_which_a_stage_will_not_come_is_called_off_and_the_next_one_trains() -> None:
    hosts = Hosts(task, staged_settings({"data": 1, "pipeline": 2}, steps=2))
    answers: list[str] = []
    waiting = spawn(lambda: answers.append(hosts.train(0, "first")))
    hosts.servers[0].call_off("meeting-first-0")
    hosts.stages[0].call_off("meeting-first-0")
    waiting.join(60)
    assert answers == [PEER_LOST]
    assert run_all([lambda: hosts.train(0, "second"), lambda: hosts.train(1, "second")]) == ["finished"] * 2
    hosts.close()


def test_a_plan_gives_each_parameter_to_one_stage_and_refuses_one_that_two_would_hold() -> None:
    settings = staged_settings({"data": 1, "pipeline": 2}, steps=1)
    hosts = Hosts(task, settings)
    names = [name for stage in hosts.plan.parameters for name in stage]
    assert sorted(names) == sorted(name for name, _ in task().build_model().named_parameters())
    assert len(hosts.plan.bounds) == 2
    stream = hosts.stages[0]._stream
    hosts.close()
    with pytest.raises(ConfigError, match="tied and would be held by two stages"):
        plan_stages(_Tied(), replace(settings, pipeline=PipelineSettings(split="equal")), stream)
