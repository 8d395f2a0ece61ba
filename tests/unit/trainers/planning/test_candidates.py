"""The schemes that are compared are configs that run as they are, each once."""

from __future__ import annotations

from typing import Any

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


def test_the_first_scheme_is_one_process_with_all_threads() -> None:
    first = candidates(config(), 4, 4)[0]
    assert first.name == "one process"
    applied = first.apply(config({"network": {"data": 4}}))
    assert applied.strategy.network.data == 1
    assert applied.resources.num_threads == 4


def test_every_scheme_of_the_platform_is_among_them_once() -> None:
    found = candidates(config(), 4, 4)
    names = [each.name for each in found]
    assert len(names) == len(set(names))
    for part in (
        "4 replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3", "recompute sqrt", "tensor 2", "2 x tensor 2", "gpipe", "zbv",
        "dual_pipe_v", "pipedream", "2 x pipeline 2", "onebit", "powersgd", "topk", "averaged every", "DiLoCo",
        "elastic", "gossiping", "synchronous server", "stale", "asynchronous server", "HOGWILD",
    ):  # fmt: skip
        assert any(part in name for name in names), part


def test_only_schemes_with_the_result_of_one_process_say_so() -> None:
    loose = ("qsgd", "float16", "onebit", "powersgd", "topk", "averaged", "DiLoCo", "elastic", "gossiping", "stale",
             "asynchronous", "HOGWILD", "pipedream")  # fmt: skip
    for each in candidates(config(), 4, 4):
        assert each.keeps_result is not any(word in each.name for word in loose), each.name


def test_what_the_rules_of_configs_forbid_is_left_out() -> None:
    names = [each.name for each in candidates(config(grad_clip=1.0), 2, 2)]
    assert not any("pipedream" in name for name in names)
    assert not any(
        "micro-batches" in each.name and "16" in each.name for each in candidates(config(batch_size=8), 2, 2)
    )


def test_one_worker_leaves_only_schemes_of_one_process() -> None:
    assert {each.name.partition(",")[0] for each in candidates(config(), 1, 2)} == {"one process"}
