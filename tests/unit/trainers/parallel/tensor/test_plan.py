"""Plans: found by looking at a model, tried on an example, or given by the task."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.batch_norm import synchronize
from orchestray.trainers.parallel.tensor.dry_run import rehearse
from orchestray.trainers.parallel.tensor.plan import find_plan, plan_of
from orchestray.trainers.tasks.digits import Digits
from orchestray.trainers.tasks.layers import multilayer_perceptron
from orchestray.trainers.tasks.python_source import PythonSource
from support.split_models import build, check_split


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# -- the built-in models ---------------------------------------------------------------------------------------------


def test_plan_of_the_fully_connected_digits() -> None:
    model = Digits().build_model()
    assert find_plan(model) == {"0": "output", "2": "input", "4": "output_gathered"}


def test_plan_of_fully_connected_layers_with_batch_normalisation_and_dropout() -> None:
    model = Digits(hidden=[16, 12], batch_norm=True, dropout=0.2).build_model()
    assert find_plan(model) == {
        "0": "output",
        "1": "features",
        "3": "dropout",
        "4": "input",
        "8": "output_gathered",
    }


def test_a_plan_is_proven_without_the_other_replicas_though_these_normalise_together() -> None:
    model = synchronize(Digits(hidden=[16, 12], batch_norm=True).build_model(), lambda: pytest.fail("asks the others"))
    assert find_plan(model, example=torch.randn(8, 64)) == {
        "0": "output", "1": "features", "3": "input", "6": "output_gathered"
    }  # fmt: skip


def test_plan_of_the_convolutional_digits_splits_the_last_layer() -> None:
    model = Digits(hidden=[8, 8], model="cnn").build_model()
    assert find_plan(model) == {str(len(model) - 1): "output_gathered"}


def test_plan_of_the_transformer() -> None:
    model = PythonSource(context=6, width=8, heads=2, depth=2).build_model()
    block = {"": "heads", ".feed_forward_input": "output", ".feed_forward_output": "input"}
    wanted = {f"{number}{part}": style for number in (1, 2) for part, style in block.items()}
    assert find_plan(model) == {**wanted, "4": "output_gathered"}
    # Too many workers for the heads: the projections are split by themselves.
    assert {style for name, style in find_plan(model, size=4).items() if "feed" not in name} == {"output_gathered"}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: multilayer_perceptron(5, [9, 7], 4, dropout=0.2, batch_norm=True),
        lambda: multilayer_perceptron(5, [8], 4),
        lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 6), nn.ReLU()), nn.Sequential(nn.Linear(6, 5), nn.PReLU())),
    ],
)
def test_found_plans_of_sequences_train_as_the_plain_models(make: Any, size: int) -> None:
    check_split(make, find_plan(make(), size=size), numbers(6, 5), size)


def test_the_found_plan_of_the_transformer_trains_as_the_plain_model() -> None:
    def make() -> nn.Module:
        return PythonSource(context=6, width=12, heads=3, depth=2, dropout=0.1).build_model()

    tokens = torch.arange(12).view(2, 6)
    check_split(make, find_plan(make(), size=3), tokens, 3)


# -- models as users write them --------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A model of layers by name, called in order."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, 16)
        self.drop = nn.Dropout(0.3)
        self.fc2 = nn.Linear(16, 8)
        self.fc3 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(functional.relu(self.fc1(x)))
        y: Tensor = self.fc3(functional.relu(self.fc2(x)))
        return y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(6, 14, bias=False)
        self.w2 = nn.Linear(14, 6, bias=False)
        self.w3 = nn.Linear(6, 14, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return y


class SideBySide(nn.Module):
    """A block that looks like a pair; the second layer does not read the first."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.left(x) * self.right(x))
        return y


class Mixed(nn.Module):
    """A pair of layers with an operation between that needs all features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).softmax(-1))
        return y


class FromItsInput(nn.Module):
    """Attention that reads the width of the whole from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 3
        self.c_attn = nn.Linear(6, 18)
        self.c_proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        samples, time, width = x.shape
        parts = self.c_attn(x).split(6, dim=2)
        q, k, v = (part.view(samples, time, self.n_head, width // self.n_head).transpose(1, 2) for part in parts)
        y: Tensor = self.c_proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return y


def test_plan_of_named_layers_called_in_order() -> None:
    plan = {"fc1": "output", "drop": "dropout", "fc2": "input", "fc3": "output_gathered"}
    assert find_plan(Classifier()) == plan
    check_split(Classifier, plan, numbers(6, 5), 2)


def test_plan_of_a_gated_feed_forward_part() -> None:
    plan = {"w1": "output", "w2": "input", "w3": "output"}
    assert find_plan(Gated()) == plan
    check_split(Gated, plan, numbers(3, 6), 3)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # a layout of memory that the plan does not look at
def test_plan_of_torch_encoder_and_decoder_layers() -> None:
    encoder = find_plan(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1))
    assert encoder == {
        "layers.0.self_attn": "heads",
        "layers.0.linear1": "output",
        "layers.0.dropout": "dropout",
        "layers.0.linear2": "input",
    }
    decoder = find_plan(nn.TransformerDecoderLayer(8, 2, 16))
    assert [name for name, style in decoder.items() if style == "heads"] == ["self_attn", "multihead_attn"]


def test_embeddings_are_split_where_it_is_worth_it() -> None:
    class Tied(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.tokens = nn.Embedding(rows, 64)
            self.positions = nn.Embedding(2**15, 64)
            self.head = nn.Linear(64, rows, bias=False)
            self.head.weight = self.tokens.weight

    assert find_plan(Tied(2**15)) == {"tokens": "embedding", "head": "output_gathered"}
    # A tied layer is not split without its embedding.
    assert find_plan(Tied(2**8)) == {}


def test_what_is_too_small_for_the_degree_is_left_whole() -> None:
    assert find_plan(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), size=4) == {}


def test_guesses_that_are_wrong_are_dropped_with_an_example() -> None:
    def make() -> nn.Module:
        return nn.Sequential(SideBySide(), Mixed(), FromItsInput(), FromItsInput(), Gated())

    model = build(make)
    before = copy.deepcopy(model.state_dict())
    plan = find_plan(model, size=2, example=numbers(2, 4, 6))
    assert plan == {
        "0.left": "output_gathered",
        "0.right": "output_gathered",
        "1.up": "output_gathered",
        "1.down": "output_gathered",
        "2.c_attn": "output_gathered",
        "2.c_proj": "output_gathered",
        "3.c_attn": "output_gathered",
        "3.c_proj": "output_gathered",
        "4.w1": "output",
        "4.w2": "input",
        "4.w3": "output",
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    check_split(make, plan, numbers(2, 4, 6), 2)


def test_a_rehearsal_says_what_the_workers_would() -> None:
    model = build(Mixed)
    assert rehearse(model, {"up": "output_gathered", "down": "input_scattered"}, 3, numbers(4, 6)) is None
    error = rehearse(model, {"up": "output", "down": "input"}, 3, numbers(4, 6))
    assert "changes what the model computes" in str(error)
    assert "'down'" in str(error)


def test_a_rehearsal_ends_when_its_members_do_different_things() -> None:
    class Odd(nn.Module):
        """A model that calls its layer only where its part is the larger one."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if self.layer.weight.shape[0] == 1:
                raise ValueError("too small")
            y: Tensor = self.layer(x)
            return y

    error = rehearse(build(Odd), {"layer": "output_gathered"}, 2, numbers(4, 4))
    assert "too small" in str(error)


# -- as the task says ------------------------------------------------------------------------------------------------


class Planned:
    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def tensor_plan(self, model: nn.Module) -> Any:
        return self._plan


def test_the_task_s_plan_may_use_patterns_and_a_name_counts_more() -> None:
    model = PythonSource(context=6, width=8, heads=2, depth=2).build_model()
    plan = {"2.feed_forward_input": "output_gathered", "*.feed_forward_*put": "output", "4": "whole"}
    assert plan_of(Planned(plan), model) == {
        "1.feed_forward_input": "output",
        "1.feed_forward_output": "output",
        "2.feed_forward_input": "output_gathered",
        "2.feed_forward_output": "output",
    }


def test_a_task_without_a_plan_gets_the_one_that_is_found() -> None:
    model = Digits().build_model()
    assert plan_of(Digits(), model) == find_plan(model)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (
            {"fc4": "output"},
            r"names the module 'fc4', which the model does not have \(did you mean 'fc\d'\?\); it has fc1",
        ),
        ({"fc1": "outputs"}, r"gives 'fc1' the style 'outputs', which there is not \(did you mean 'output'\?\)"),
        (
            {"layers.*": "output"},
            r"has the pattern 'layers.\*', which fits no module; the model has fc1, drop, fc2, fc3",
        ),
        ({"fc1": 3}, "gives 'fc1' 3, which is not a style"),
        (["fc1"], "must return a dictionary of styles by the names of modules; it returned a list"),
    ],
)
def test_a_plan_that_names_what_there_is_not_is_refused(plan: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan_of(Planned(plan), Classifier())


def test_every_problem_of_a_plan_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(Planned({"fc9": "output", "fc1": "sideways"}), Classifier())
    assert len(caught.value.problems) == 2
