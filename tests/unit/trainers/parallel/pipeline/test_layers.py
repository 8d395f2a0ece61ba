"""Stages run one after the other are the whole model: outputs, gradients, buffers and names."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.pipeline.cutting import layers_of
from orchestray.trainers.parallel.pipeline.layers import Layers, Tied
from orchestray.trainers.tasks.digits import Digits
from orchestray.trainers.tasks.python_source import PythonSource
from support import cut_models
from support.cut_models import MODELS, ResidualNet, Shared, build, leaves_of, run_chain, run_plain, vectors

NO_TASK: Any = SimpleNamespace()


def bounds_of(num_layers: int) -> list[list[tuple[int, int]]]:
    """Return cuts into one, two and three stages and into single layers."""
    ends = [[], *([cut] for cut in range(1, num_layers)), *itertools.combinations(range(1, num_layers), 2)]
    ends = [*ends[: num_layers + 4], list(range(1, num_layers))]
    return [list(itertools.pairwise([0, *end, num_layers])) for end in ends]


def assert_same(ours: Any, theirs: Any) -> None:
    assert torch.utils._pytree.tree_structure(ours) == torch.utils._pytree.tree_structure(theirs)
    for a, b in zip(leaves_of(ours), leaves_of(theirs), strict=True):
        assert torch.equal(a, b) if isinstance(b, Tensor) else a == b


def assert_chain_is_model(layers: Layers, bounds: Sequence[tuple[int, int]], inputs: Tensor) -> None:
    """Assert that the chain is the model bit for bit, twice in training and once in evaluation.

    Random numbers are included. Gradients of parameters that several stages share are added up in another order.
    """
    shared = {tied.name for tied in layers.tied(bounds)}
    plain = copy.deepcopy(layers.model)
    stages = [layers.stage(*bound) for bound in bounds]
    state = {name: value.clone() for name, value in layers.model.state_dict().items()}
    for seed, training in ((0, True), (1, True), (2, False)):
        plain.train(training).zero_grad()
        layers.model.train(training).zero_grad()
        for stage in stages:
            stage.train(training)
        with torch.set_grad_enabled(training):
            torch.manual_seed(seed)
            expected = run_plain(plain, inputs.clone())
            torch.manual_seed(seed)
            assert_same(run_chain(stages, inputs.clone()), expected)
        for (name, ours), theirs in zip(layers.model.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                close = {"rtol": 1e-12, "atol": 1e-14} if name in shared else {"rtol": 0.0, "atol": 0.0}
                torch.testing.assert_close(ours.grad, theirs.grad, **close)
        assert_same(dict(layers.model.named_buffers()), dict(plain.named_buffers()))
    layers.model.load_state_dict(state)


@pytest.mark.parametrize("name", MODELS)
def test_stages_are_the_whole_model_bit_for_bit_wherever_it_is_cut(name: str) -> None:
    layers = layers_of(NO_TASK, build(name))
    assert len(layers) >= 3
    torch.manual_seed(1)
    inputs = MODELS[name][1]()
    for bounds in bounds_of(len(layers)):
        assert_chain_is_model(layers, bounds, inputs)


class Weighing(nn.Module):
    """A model that returns a parameter and a buffer of its own, as a loss of several tasks weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.log_variance = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.full((2,), 3.0))

    def forward(self, inputs: Tensor) -> tuple[Any, ...]:
        return self.last(self.middle(self.first(inputs).tanh()).tanh()), self.log_variance, self.scale


def test_parameters_and_buffers_that_a_model_returns_are_held_by_its_last_stage() -> None:
    layers = layers_of(NO_TASK, Weighing().double())
    for bounds in bounds_of(len(layers)):
        assert_chain_is_model(layers, bounds, vectors())
    assert "log_variance" in layers.stage(1, len(layers)).state_dict()


@pytest.mark.parametrize("depth", [2, 8, 12])
def test_modules_are_looked_into_until_there_are_layers_enough(depth: int) -> None:
    layers = layers_of(NO_TASK, build("residual"), at_least=depth)
    assert len(layers) >= depth
    assert ("blocks.1" in layers.names) == (depth <= 7)
    assert ("blocks.1.norm" in layers.names) == (depth > 7)
    for bounds in ([(0, 3), (3, 5), (5, len(layers))], [(index, index + 1) for index in range(len(layers))]):
        assert_chain_is_model(layers, bounds, vectors())


@pytest.mark.parametrize("name", ["encoder", "causal_encoder"])
def test_torchs_stack_of_transformer_layers_is_cut_between_them(name: str) -> None:
    layers = layers_of(NO_TASK, build(name), at_least=6)
    stack = ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"]
    assert layers.names == ["embedding", *stack, "encoder.norm", "head"]
    assert layers.whole == {}
    for bounds in bounds_of(len(layers)):
        assert_chain_is_model(layers, bounds, MODELS[name][1]())


def test_a_module_named_to_begin_a_stage_is_reached_inside_others() -> None:
    layers = layers_of(NO_TASK, build("residual"), begins=["blocks.1.second"])
    assert "blocks.1.second" in layers.names


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_the_models_tensors_under_its_names_and_together_all_of_them(name: str) -> None:
    model = build(name)
    layers = layers_of(NO_TASK, model)
    plain = model.state_dict(keep_vars=True)
    bounds = bounds_of(len(layers))[1]
    states = [layers.stage(*bound).state_dict(keep_vars=True) for bound in bounds]
    assert set().union(*states) == set(plain)
    for state in states:
        assert all(state[key] is plain[key] for key in state)
        assert list(state) == [key for key in plain if key in state]


@pytest.mark.parametrize("task", [Digits(), Digits((4, 4), "cnn", dropout=0.2), PythonSource(8, 16, 3, 2, dropout=0.1)])
def test_the_built_in_tasks_models_are_cut_anywhere(task: Any) -> None:
    torch.manual_seed(0)
    model = task.build_model().double()
    inputs = task.to_batch(task.dataset("validation").slice(0, 6))["inputs"]
    layers = layers_of(task, model)
    for bounds in bounds_of(len(layers))[:4]:
        assert_chain_is_model(layers, bounds, inputs.double() if inputs.is_floating_point() else inputs)


@pytest.mark.parametrize("name", MODELS)
def test_the_batch_size_is_not_fixed_by_cutting(name: str) -> None:
    layers = layers_of(NO_TASK, build(name))
    stages = [layers.stage(0, 2), layers.stage(2, len(layers))] if name != "shared" else [layers.stage(0, len(layers))]
    layers.model.eval()
    for stage in stages:
        stage.eval()
    with torch.no_grad():
        for samples in (1, 7) if name in {"transformer", "recurrent"} else (0, 1, 7):
            inputs = MODELS[name][1](samples)
            assert_same(run_chain(stages, inputs), layers.model(inputs))


def test_tied_parameters_are_told_with_their_first_name_and_their_name_in_each_stage() -> None:
    layers = layers_of(NO_TASK, build("tied_attention"))
    last = len(layers)
    assert layers.tied([(0, 1), (1, last - 1), (last - 1, last)]) == [
        Tied("embedding.weight", ((0, "embedding.weight"), (2, "head.weight")))
    ]
    assert layers.tied([(0, last)]) == []
    shared = layers_of(NO_TASK, Shared())
    assert [tied.name for tied in shared.tied([(0, 1), (1, 4)])] == ["shared.weight", "shared.bias"]
    assert shared.tied([(0, 1), (1, 2), (2, 4)])[0].uses == (
        (0, "shared.weight"),
        (1, "shared.weight"),
        (2, "shared.weight"),
    )


def test_a_module_with_buffers_in_two_stages_is_refused_and_in_one_it_works() -> None:
    layers = layers_of(NO_TASK, Shared(norm=True).double(), at_least=7)
    assert layers.names[:2] == ["shared.0", "shared.1"]
    assert_chain_is_model(layers, [(0, len(layers))], vectors())
    with pytest.raises(ConfigError, match=r"buffer shared\.1\.running_mean would be in two stages"):
        layers.stage(0, 2)
    with pytest.raises(ConfigError, match=r"buffer shared\.1\.running_mean would be in two stages"):
        layers.tied([(0, 3), (3, len(layers))])


class Wrapped(nn.Module):
    """A part a task makes for its list, of the model's modules and parameters."""

    def __init__(self, model: ResidualNet) -> None:
        super().__init__()
        self.block, self.dropped = model.blocks[0], nn.Dropout(0.5)
        self.offset = model.stem.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.dropped(self.block(x)) + self.offset


def test_a_tasks_own_layers_may_be_parts_of_the_model_and_modules_made_of_them() -> None:
    model = build("residual")
    assert isinstance(model, ResidualNet)
    parts = [model.stem, nn.Tanh(), Wrapped(model), model.blocks[1], nn.Sequential(nn.Dropout(0.1), model.head)]
    layers = layers_of(SimpleNamespace(layers=lambda _: parts), model)
    assert layers.names == ["stem", "layer_1", "layer_2", "blocks.1", "layer_4", "head.0", "head.1.0", "head.1.1"]
    whole = nn.Sequential(*parts)
    stages = [layers.stage(0, 2), layers.stage(2, 3), layers.stage(3, 8)]
    names = set().union(*(stage.state_dict() for stage in stages))
    assert names == set(model.state_dict())
    assert [tied.name for tied in layers.tied([(0, 2), (2, 3), (3, 8)])] == ["stem.bias"]
    for training in (True, False):
        whole.train(training)
        for stage in stages:
            stage.train(training)
        inputs = vectors()
        torch.manual_seed(3)
        expected = whole(inputs)
        torch.manual_seed(3)
        with torch.no_grad():
            assert_same(run_chain(stages, inputs), expected)


def test_a_tasks_layers_with_parameters_of_their_own_are_refused() -> None:
    model = build("residual")
    with pytest.raises(ConfigError, match=r"\(Linear, number 2\) with parameters or buffers that are not the model's"):
        layers_of(SimpleNamespace(layers=lambda _: [model.stem, nn.Linear(8, 8)]), model)
    with pytest.raises(ConfigError, match="gave a builtin_function_or_method where modules are wanted"):
        layers_of(SimpleNamespace(layers=lambda _: [model.stem, torch.relu]), model)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        first, second = x if isinstance(x, tuple) else (x, x)
        return self.linear(first), second


def test_tuples_of_tensors_pass_between_the_layers_of_a_sequence() -> None:
    layers = layers_of(NO_TASK, nn.Sequential(Pair(), Pair(), Pair()).double())
    for bounds in bounds_of(3):
        assert_chain_is_model(layers, bounds, vectors())


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        x = {"x": x, "more": [None, (x, 2)], "flag": True} if isinstance(x, Tensor) else x
        return {**x, "more": [None, (self.linear(x["x"]) * x["more"][1][0], x["more"][1][1])]}


class Last(nn.Module):
    def forward(self, x: Any) -> Tensor:
        (found, factor), flag = x["more"][1], x["flag"]
        return found * factor if flag else found


def test_containers_of_tensors_and_plain_values_pass_between_stages() -> None:
    layers = layers_of(NO_TASK, nn.Sequential(Several(), Several(), Last()).double())
    for bounds in bounds_of(3):
        assert_chain_is_model(layers, bounds, vectors())


class Branches(nn.Module):
    """Two values pass from its first layer on: a tuple of tensors, and None where there is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.nothing, self.last = nn.Linear(6, 6), Pair(), Nothing(), Joined()

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        pair, nothing = self.pair(x), self.nothing(x)
        return self.last(x, pair, nothing)


class Nothing(nn.Module):
    def forward(self, _x: Tensor) -> None:
        return None


class Joined(nn.Module):
    def forward(self, x: Tensor, pair: Any, nothing: None) -> Tensor:
        return x + pair[0] * pair[1] if nothing is None else x


def test_a_tuple_and_nothing_pass_beside_other_values() -> None:
    layers = layers_of(NO_TASK, Branches().double(), at_least=4)
    assert layers.names == ["first", "pair", "nothing", "last"]
    for bounds in bounds_of(4):
        assert_chain_is_model(layers, bounds, vectors())


class Named(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(x=x)


def test_an_object_between_stages_is_refused_with_the_layers_name() -> None:
    layers = layers_of(NO_TASK, nn.Sequential(nn.Linear(6, 6), Named(), nn.Identity()).double())
    with pytest.raises(ConfigError, match="The layer 1 hands on a SimpleNamespace"):
        layers.stage(0, 2)(vectors())


def test_a_copy_of_a_stage_uses_its_own_parameters() -> None:
    layers = layers_of(NO_TASK, build("residual"))
    stage = layers.stage(0, 3).eval()
    copied = copy.deepcopy(stage)
    inputs = vectors()
    before = stage(inputs)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert_same(stage(inputs), before)
    assert not torch.equal(copied(inputs)[0], before[0])


def test_an_error_in_a_stage_names_the_users_line() -> None:
    layers = layers_of(NO_TASK, build("residual"))
    assert layers.names[2] == "blocks.1"
    stage = layers.stage(2, len(layers))
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        stage(torch.zeros(5, 7, dtype=torch.float64), torch.zeros(5, 8, dtype=torch.float64))
    line = 1 + Path(cut_models.__file__).read_text().split("\n").index("        return self.head(x + skip)")
    assert caught.value.__notes__ == [f"in the model's forward: {cut_models.__file__}, line {line}"]
