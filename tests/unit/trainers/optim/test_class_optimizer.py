"""Optimizers that are classes of torch or of a user: they train as they do without us, in any layout that fits."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.errors import CheckpointError, ConfigError, OrchestrayError
from orchestray.trainers.optim.class_optimizer import ClassOptimizer
from orchestray.trainers.optim.factory import make_optimizer
from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.staged_run import staged_settings, train_staged
from support.training import few_digits

OWN = '''
import torch


class Signs(torch.optim.Optimizer):
    """Moves by the sign of a mean of the gradients; counts its steps in a plain number."""

    def __init__(self, params, lr, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                state["count"] = state.get("count", 0) + 1
                mean.lerp_(parameter.grad, 1 - group["decay"])
                parameter.sub_(torch.sign(mean), alpha=group["lr"] / state["count"])


class Normed(torch.optim.Optimizer):
    """Moves each parameter by its gradient over the gradient's norm, which a part of it does not know."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (parameter.grad.norm() + 1e-6), alpha=group["lr"])


class Counted(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class Clipped(torch.optim.SGD):
    """Scales all gradients by their common norm."""

    def step(self, closure=None):
        found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in found]).norm()
        for gradient in found:
            gradient.div_(norm)
        super().step()


class Listed(torch.optim.SGD):
    """Keeps its last steps in a list."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.past = []

    def step(self, closure=None):
        super().step()
        self.past.append(1.0)


class Shared(torch.optim.SGD):
    """Keeps a count of its own beside those of the parameters."""

    def step(self, closure=None):
        super().step()
        self.state["all"]["count"] = self.state["all"].get("count", 0) + 1


class Late(torch.optim.SGD):
    """Begins to keep a sum at its fifth step."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                if state["count"] >= 5:
                    state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(state["sum"], alpha=group["lr"])


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


class NoOptimizer:
    pass
'''
CLASSES: list[dict[str, Any]] = [
    {"type": "torch.optim:NAdam", "lr": 0.01},
    {"type": "torch.optim:Adamax", "lr": 0.01, "betas": [0.8, 0.99]},
    {"type": "torch.optim:Rprop", "lr": 0.01},
    {"type": "own.py:Signs", "lr": 0.01, "decay": 0.5},
    {"type": "own.py:Late", "lr": 0.01},
]


def name_of(chosen: dict[str, Any]) -> str:
    return str(chosen["type"]).rpartition(":")[2]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def trained(optimizer: dict[str, Any], network: dict[str, Any] | None = None, **rest: Any) -> dict[str, torch.Tensor]:
    """Return the weights after a few steps."""
    settings = layout_settings(network, rest.pop("exchange", {}), optimizer=optimizer, **{"steps": 5, **rest})
    return train_laid_out(few_digits, settings).weights


@functools.cache
def trained_alone(chosen: str) -> dict[str, torch.Tensor]:
    """Return the weights of one process, for an optimizer's section as JSON."""
    return trained(json.loads(chosen))


def made(optimizer: dict[str, Any]) -> ClassOptimizer:
    found = make_optimizer(**layout_settings(optimizer=optimizer).optimizer)
    assert isinstance(found, ClassOptimizer)
    return found


@pytest.mark.parametrize("chosen", CLASSES, ids=name_of)
def test_steps_are_those_of_the_class_at_the_rates_of_the_schedule(chosen: dict[str, Any]) -> None:
    optimizer = made(chosen)
    start, *gradients = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1))
    ours, theirs = start.clone(), start.clone()
    optimizer.init([("w", ours)])
    plain = optimizer._class([theirs], **optimizer._arguments)
    for step, gradient in enumerate(gradients, start=1):
        lr = 0.1 / step
        optimizer.step([ours], [gradient.clone()], lr)
        plain.param_groups[0]["lr"], theirs.grad = lr, gradient.clone()
        with torch.no_grad():
            plain.step()
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, start)


@pytest.mark.parametrize("chosen", CLASSES, ids=name_of)
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2},
        {"data": 2, "shard": "gradients"},
        {"data": 2, "shard": "parameters"},
        {"tensor": 2},
        {"pipeline": 2},
    ],
    ids=["replicas", "ZeRO 2", "ZeRO 3", "tensor", "pipeline"],
)
def test_any_layout_trains_to_the_weights_of_one_process(chosen: dict[str, Any], layout: dict[str, Any]) -> None:
    network = {key: value for key, value in layout.items() if key != "shard"}
    exchange = {"shard": layout["shard"]} if "shard" in layout else {}
    alone, together = trained_alone(json.dumps(chosen)), trained(chosen, network, exchange=exchange)
    assert alone.keys() == together.keys()
    for name, weights in alone.items():
        torch.testing.assert_close(together[name], weights, rtol=1e-9, atol=1e-11)


def test_one_steps_on_newer_weights_while_a_stream_goes_back_through_older_ones() -> None:
    network = {"pipeline": 3, "split": "equal", "schedule": "pipedream", "microbatches": 4}
    keys = {"lr": 0.1, "momentum": 0.9}
    torchs, ours = (trained({"type": kind, **keys}, network) for kind in ("torch.optim:SGD", "sgd"))
    for name, weights in ours.items():
        torch.testing.assert_close(torchs[name], weights, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chosen", CLASSES, ids=name_of)
def test_one_that_is_loaded_goes_on_bit_for_bit(chosen: dict[str, Any]) -> None:
    start, *gradients = torch.randn(12, 4, 3, generator=torch.Generator().manual_seed(2))
    weights = [start.clone(), start.clone()]
    whole, resumed = made(chosen), made(chosen)
    whole.init([("w", weights[0]), ("unused", torch.zeros(2))])
    resumed.init([("w", weights[1]), ("unused", torch.zeros(2))])
    for number, gradient in enumerate(gradients):
        if number in (3, 7):
            state = {name: tensor.clone() for name, tensor in resumed.state_tensors().items()}
            resumed = made(chosen)
            resumed.init([("w", weights[1]), ("unused", torch.zeros(2))])
            resumed.load_state_tensors(state)
        for optimizer, weight in zip((whole, resumed), weights, strict=True):
            optimizer.step([weight, torch.zeros(2)], [gradient.clone(), None], 0.05)
    assert torch.equal(*weights)


def test_a_state_that_does_not_fit_is_refused() -> None:
    optimizer = made(CLASSES[0])
    weight = torch.zeros(2, 2)
    optimizer.init([("w", weight)])
    optimizer.step([weight], [torch.ones(2, 2)], 0.1)
    state = dict(optimizer.state_tensors())
    for change, message in (
        ({"v.exp_avg": state["w.exp_avg"]}, r"has 'v\.exp_avg', which NAdam or this model has not"),
        ({"w.exp_avg": torch.zeros(3)}, r"w\.exp_avg has the shape \(3,\), and the parameter \(2, 2\)"),
        ({"w.exp_avg": None}, r"lacks w\.exp_avg"),
    ):
        changed = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
        with pytest.raises(CheckpointError, match=message):
            optimizer.load_state_tensors(changed)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"type": "own.py:NoOptimizer"}, "NoOptimizer is not a torch.optim.Optimizer"),
        ({"type": "own.py:Sign"}, r"train.optimizer.type: there is no class Sign in own\.py; did you mean 'Signs'"),
        ({"type": "nowhere.py:Signs"}, r"train.optimizer.type: there is no file .*nowhere\.py"),
        ({"type": "no_such_module:Signs"}, "there is no module no_such_module for train.optimizer.type"),
        ({"type": "own.py:Signs", "decai": 0.5}, r"Signs refuses its arguments: .*decai.*; it takes lr, decay"),
        ({"type": "torch.optim:LBFGS"}, "makes no step from gradients alone .* evaluates the loss itself"),
        ({"type": "torch.optim:SparseAdam"}, "wants sparse gradients or another device cannot be used here"),
        ({"type": "torch.optim:Adafactor"}, "its state 'row_var' has neither the shape of its parameter nor is it"),
        ({"type": "own.py:Counted"}, r"keeps state in param_groups\['count'\], which would be lost"),
        ({"type": "own.py:Listed"}, "keeps state in past, which would be lost"),
        ({"type": "own.py:Shared"}, r"keeps state in state\['all'\], which would be lost"),
        ({"type": "own.py:Noisy"}, "draws random numbers, which would be others on each worker"),
        (
            {"type": "torch.optim:SGD", "fused": True, "foreach": True},
            "SGD refuses its arguments: `fused` and `foreach`",
        ),
        (
            {"type": "own.py:Clipped", "groups": [{"match": "*", "lr": 0.2}]},
            "depends on the gradients of all, and each",
        ),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_used_is_refused_in_a_sentence(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(OrchestrayError, match=message):
        made({"lr": 0.1, **chosen})


def test_one_that_looks_at_whole_parameters_makes_the_same_steps_where_they_are_cut() -> None:
    chosen = {"type": "own.py:Normed", "lr": 0.01}
    alone = trained(chosen)
    for network, exchange in (({"data": 2}, {}), ({"data": 2}, {"shard": "gradients"}), ({"tensor": 2}, {})):
        found = trained(chosen, network, exchange=exchange)
        for name, weights in alone.items():
            torch.testing.assert_close(found[name], weights, rtol=1e-9, atol=1e-11)


def test_one_that_looks_at_whole_parameters_is_refused_in_a_stream_of_stages_that_are_split() -> None:
    network = {"pipeline": 2, "tensor": 2, "schedule": "pipedream", "microbatches": 2}
    with pytest.raises(ConfigError, match=r"looks at whole parameters, and pipedream's stages move a part of '"):
        trained({"type": "own.py:Normed", "lr": 0.01}, network)


def test_one_that_mixes_parameters_is_refused_where_no_process_has_all_of_them(tmp_path: Path) -> None:
    chosen = {"type": "own.py:Clipped", "lr": 0.01}
    for name, weights in trained(chosen).items():
        torch.testing.assert_close(trained(chosen, {"data": 2})[name], weights, rtol=1e-9, atol=1e-11)
    for network, exchange in (
        ({"data": 2}, {"shard": "gradients"}),
        ({"data": 2}, {"shard": "parameters"}),
        ({"tensor": 2}, {}),
        ({"pipeline": 2}, {}),
    ):
        with pytest.raises(ConfigError, match=r"own\.py:Clipped moves a parameter by the gradients of others as well"):
            trained(chosen, network, exchange=exchange)
    servers = {"shards": 2, "consistency": "synchronous"}
    with pytest.raises(ConfigError, match="here no server has all of them"):
        train_central(few_digits, central_settings(2, servers, steps=2, optimizer=chosen), tmp_path / "run")


def test_one_that_looks_at_whole_parameters_makes_the_same_steps_on_servers_that_hold_them(tmp_path: Path) -> None:
    chosen = {"type": "own.py:Normed", "lr": 0.01}
    found = train_central(few_digits, central_settings(2, {"shards": 2}, steps=5, optimizer=chosen), tmp_path)
    for name, weights in trained(chosen).items():
        torch.testing.assert_close(found.weights[name], weights, rtol=1e-9, atol=1e-11)
    settings = staged_settings({"tensor": 2}, {"factors": "always"}, optimizer=chosen)
    with pytest.raises(ConfigError, match="the optimizer has to see whole parameters, and the workers of a tensor"):
        train_staged(few_digits, settings, tmp_path)


def test_servers_step_by_a_class_and_shared_memory_refuses_it(tmp_path: Path) -> None:
    chosen = CLASSES[0]
    settings = central_settings(2, {"shards": 2, "consistency": "synchronous"}, steps=5, optimizer=chosen)
    found = train_central(few_digits, settings, tmp_path / "run")
    for name, weights in trained(chosen).items():
        torch.testing.assert_close(found.weights[name], weights, rtol=1e-9, atol=1e-11)
    with pytest.raises(ConfigError, match="keeps its state to itself, and workers on shared memory share theirs"):
        layout_settings({"data": 2}, {"type": "parameter_server", "transport": "shared_memory"}, optimizer=chosen)
