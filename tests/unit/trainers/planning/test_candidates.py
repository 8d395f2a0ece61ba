"""The schemes that are compared are configs that run as they are, each once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.planning.candidates import candidates


def config(strategy: dict[str, Any] | None = None, **train: Any) -> TrainConfig:
    return load_train_config(
        {
            "task": {"type": "digits"},
            "train": {"batch_size": 64, "steps": 10, "optimizer": {"type": "sgd", "lr": 0.1}, **train},
            **({"strategy": strategy} if strategy else {}),
        }
    )


def names_of(given: TrainConfig, num_workers: int, cores: int) -> list[str]:
    return [candidate.name for candidate, _ in candidates(given, num_workers, cores)]


def test_the_first_scheme_is_one_process_with_all_threads() -> None:
    first, applied = candidates(config({"network": {"data": 4}}), 4, 4)[0]
    assert first.name == "one process"
    assert applied.strategy.network.data == 1
    assert applied.resources.num_threads == 4


@pytest.mark.parametrize(("num_workers", "cores"), [(4, 4), (6, 8), (12, 16)])
def test_no_two_schemes_have_one_name(num_workers: int, cores: int) -> None:
    names = names_of(config(), num_workers, cores)
    assert len(names) == len(set(names))


def test_workers_have_the_cores_of_all_machines_so_that_none_is_left_empty() -> None:
    for candidate, applied in candidates(config(), 16, 8, nodes=4)[1:]:
        network, threads = applied.strategy.network, applied.resources.num_threads
        workers = network.data * network.tensor * network.pipeline
        if workers > 1:
            assert threads == {2: 8, 4: 8, 8: 4, 16: 2}[workers], candidate.name


def test_every_scheme_of_the_platform_is_among_them() -> None:
    names = names_of(config(), 4, 4)
    for part in (
        "4 replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3", "recompute sqrt", "tensor 2", "2 x tensor 2", "gpipe", "zbv",
        "dual_pipe_v", "pipedream", "2 x pipeline 2", "onebit", "powersgd", "topk", "averaged every", "DiLoCo",
        "elastic", "gossiping", "synchronous server", "stale", "asynchronous server", "HOGWILD",
    ):  # fmt: skip
        assert any(part in name for name in names), part


def test_what_the_rules_of_configs_forbid_is_left_out() -> None:
    names = names_of(config(grad_clip=1.0), 2, 2)
    assert not any("pipedream" in name for name in names)
    small = names_of(config(batch_size=8), 2, 2)
    assert any("4 micro-batches" in name for name in small)
    assert not any("16 micro-batches" in name for name in small)


def test_a_candidate_is_the_config_with_its_changes_and_nothing_else() -> None:
    given = config({"network": {"data": 4}}, accumulate=2)
    data = given.model_dump(mode="json")
    for candidate, applied in candidates(given, 4, 4):
        changed = json.loads(json.dumps(data))
        for path, value in candidate.changes.items():
            section, _, key = path.rpartition(".")
            (changed[section] if section else changed)[key] = value
        assert applied == load_train_config(changed)
    assert given.model_dump(mode="json") == data


def test_one_worker_leaves_only_schemes_of_one_process() -> None:
    assert {name.partition(",")[0] for name in names_of(config(), 1, 2)} == {"one process"}
