"""Groups of parameters with values of their own: the steps are those of torch with the same groups, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.grouped_optimizer import check_matches
from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.training import few_digits, regression

ADAMW: dict[str, Any] = {
    "type": "adamw",
    "lr": 0.01,
    "weight_decay": 0.1,
    "groups": [{"match": "*.bias", "weight_decay": 0.0}, {"match": "0.*", "lr": 0.02}],
}


def trained(optimizer: dict[str, Any], network: dict[str, Any] | None = None, **exchange: Any) -> dict[str, Any]:
    return train_laid_out(few_digits, layout_settings(network, exchange, optimizer=optimizer, steps=4)).weights


@pytest.mark.parametrize("kind", ["adamw", "torch.optim:AdamW"])
def test_each_group_makes_the_steps_of_torch_with_its_values(kind: str) -> None:
    optimizer = make_optimizer(**{**ADAMW, "type": kind})
    start = {name: torch.randn(4, 3) for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
    ours = {name: tensor.clone() for name, tensor in start.items()}
    theirs = {name: tensor.clone() for name, tensor in start.items()}
    plain = torch.optim.AdamW(
        [
            {"params": [theirs["0.bias"], theirs["1.bias"]], "weight_decay": 0.0, "ratio": 1.0},
            {"params": [theirs["0.weight"]], "weight_decay": 0.1, "ratio": 2.0},
            {"params": [theirs["1.weight"]], "weight_decay": 0.1, "ratio": 1.0},
        ],
        lr=0.01,
        fused=kind == "adamw",
    )
    optimizer.init(list(ours.items()))
    for step in range(1, 5):
        lr = 0.01 / step
        gradients = {name: torch.randn(4, 3) for name in start}
        optimizer.step(list(ours.values()), [gradients[name].clone() for name in ours], lr)
        for name, tensor in theirs.items():
            tensor.grad = gradients[name].clone()
        for group in plain.param_groups:
            group["lr"] = lr * group["ratio"]
        with torch.no_grad():
            plain.step()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("network", "exchange"),
    [({"data": 2}, {}), ({"data": 2}, {"shard": "parameters"}), ({"tensor": 2}, {}), ({"pipeline": 2}, {})],
    ids=["replicas", "ZeRO 3", "tensor", "pipeline"],
)
def test_any_layout_trains_to_the_weights_of_one_process(network: dict[str, Any], exchange: dict[str, Any]) -> None:
    alone, together = trained(ADAMW), trained(ADAMW, network, **exchange)
    for name, weights in alone.items():
        torch.testing.assert_close(together[name], weights, rtol=1e-9, atol=1e-11)
    plain = trained({**ADAMW, "groups": []})
    assert all(not torch.allclose(alone[name], weights, rtol=1e-6, atol=0) for name, weights in plain.items())


LARS: dict[str, Any] = {"type": "lars", "lr": 0.1, "groups": [{"match": "0.*", "weight_decay": 0.1}]}


@pytest.mark.parametrize(
    ("network", "exchange"), [({"data": 2}, {"shard": "gradients"}), ({"pipeline": 2}, {})], ids=["ZeRO 2", "pipeline"]
)
def test_workers_without_a_parameter_of_a_group_take_part_in_its_norms(
    network: dict[str, Any], exchange: dict[str, Any]
) -> None:
    alone, together = trained(LARS), trained(LARS, network, **exchange)
    for name, weights in alone.items():
        torch.testing.assert_close(together[name], weights, rtol=1e-9, atol=1e-11)


def test_a_tied_weight_of_several_stages_is_matched_by_its_first_name() -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(5, 8), *(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 1)]
        layers[5].weight = layers[1].weight
        return nn.Sequential(*layers)

    rows = regression()
    rows.build_model = tied  # type: ignore[method-assign]
    chosen = {"type": "sgd", "lr": 0.01, "groups": [{"match": "1.weight", "lr": 0.1}]}
    alone, together = (
        train_laid_out(lambda: rows, layout_settings(network, optimizer=chosen, steps=4)).weights
        for network in ({}, {"pipeline": 2})
    )
    for name, weights in alone.items():
        torch.testing.assert_close(together[name], weights, rtol=1e-9, atol=1e-11)


def test_shards_of_servers_know_the_groups_of_the_parts_that_they_hold(tmp_path: Path) -> None:
    settings = central_settings(2, {"shards": 2, "consistency": "synchronous"}, steps=4, optimizer=ADAMW)
    found = train_central(few_digits, settings, tmp_path / "run")
    for name, weights in trained(ADAMW).items():
        torch.testing.assert_close(found.weights[name], weights, rtol=1e-9, atol=1e-11)


def test_one_that_is_loaded_goes_on_bit_for_bit_and_a_state_of_another_model_is_refused() -> None:
    weights = [{name: torch.ones(3) for name in ("0.weight", "0.bias")} for _ in range(2)]
    whole, resumed = make_optimizer(**ADAMW), make_optimizer(**ADAMW)
    whole.init(list(weights[0].items()))
    resumed.init(list(weights[1].items()))
    for step in range(1, 5):
        if step == 3:
            state = {key: tensor.clone() for key, tensor in resumed.state_tensors().items()}
            resumed = make_optimizer(**ADAMW)
            resumed.init(list(weights[1].items()))
            resumed.load_state_tensors(state)
        gradients = [torch.full((3,), float(step)), torch.full((3,), 0.5)]
        for optimizer, held in zip((whole, resumed), weights, strict=True):
            optimizer.step(list(held.values()), [gradient.clone() for gradient in gradients], 0.1)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with pytest.raises(CheckpointError, match=r"has '2\.weight\.step', which this model has not"):
        resumed.load_state_tensors({**state, "2.weight.step": torch.zeros(())})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "*.bias", "weight_decai": 0.0}], "groups.0: weight_decai is not one of its keys: lr, betas, eps"),
        ([{"match": "*.bias", "type": "sgd"}], "groups.0: type is one for all parameters"),
        ([{"match": "*.bias", "weight_decay": -1.0}], r"groups.0.weight_decay: .* got -1.0"),
        ([{"weight_decay": 0.0}], r"groups.0.match: is required"),
    ],
)
def test_a_group_that_is_wrong_is_refused_by_its_place(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_settings(optimizer={**ADAMW, "groups": groups})


def test_a_pattern_that_no_parameter_has_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"groups\.0\.match: no parameter has a name like '0\.weigth'.*'0\.weight'"):
        trained({**ADAMW, "groups": [{"match": "0.weigth", "weight_decay": 0.0}]})


def test_a_pattern_of_frozen_parameters_is_refused_as_such() -> None:
    named = [("a.weight", torch.zeros(1, requires_grad=True)), ("b.weight", torch.zeros(1))]
    check_matches([{"match": "*.weight"}], named)
    with pytest.raises(ConfigError, match=r"groups\.0\.match: 'b\.\*' matches only parameters that are not trained"):
        check_matches([{"match": "b.*"}], named)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"nesterov": True, "momentum": 0.0}, r"groups\.0\.nesterov: needs a momentum"),
        ({"momentum": 0.5}, r"groups\.0\.momentum: dgc keeps a momentum of its own"),
    ],
)
def test_what_an_optimizer_may_not_have_a_group_may_not_have_either(chosen: dict[str, Any], message: str) -> None:
    optimizer = {"type": "sgd", "lr": 0.1, "groups": [{"match": "*.bias", **chosen}]}
    strategy = {"network": {"data": 2}, "exchange": {"type": "allreduce"}, "compression": {"type": "dgc"}}
    train = {"steps": 3, "batch_size": 8, "optimizer": optimizer}
    with pytest.raises(ConfigError, match=message):
        load_train_config({"name": "groups", "task": {"type": "digits"}, "strategy": strategy, "train": train})


@pytest.mark.parametrize("exchange", [{"transport": "shared_memory"}, {"fetch_every": 2}])
def test_workers_that_step_by_themselves_have_no_groups(exchange: dict[str, Any]) -> None:
    chosen = {"type": "parameter_server", "consistency": "asynchronous", **exchange}
    with pytest.raises(ConfigError, match="groups are for the servers' steps"):
        layout_settings({"data": 2}, chosen, optimizer={**ADAMW, "type": "sgd"})
