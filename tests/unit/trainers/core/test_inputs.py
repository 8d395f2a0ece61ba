"""Several inputs of a model: every layout of a run gives what plain PyTorch gives."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import TrainingError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.core.inputs import InputForm, call
from orchestray.trainers.validate import layout as validated
from support.central_run import central_settings, train_central
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.plain import train_plainly
from support.training import furthest

LENGTH, WIDTH, STEPS = 5, 6, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "data 3": {"network": {"data": 3}},
    "ZeRO-2": {"network": {"data": 2}, "exchange": {"shard": "gradients"}},
    "ZeRO-3": {"network": {"data": 2}, "exchange": {"shard": "parameters"}},
    "pipeline 2": {"network": {"pipeline": 2}},
    "pipeline 2 x data 2": {"network": {"pipeline": 2, "data": 2, "schedule": "zbv"}},
    "tensor 2": {"network": {"tensor": 2}},
    "tensor 2 x pipeline 2": {"network": {"tensor": 2, "pipeline": 2}},
    "recomputed blocks": {"recompute": "blocks"},
    "recomputed chain": {"recompute": "sqrt"},
}


class Block(nn.Module):
    """A layer that needs the mask as well, so that the mask has to reach every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(functional.relu(self.up(x))) * mask[..., None]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(LENGTH * WIDTH, 3)

    def forward(self, ids: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Any:
        x = self.words(ids)
        assert mask is not None
        for block in self.blocks:
            x = block(x, mask)
        found = self.head(x.reshape(x.shape[0], -1))
        return {"logits": found if bias is None else found + bias}


class Nested(Reader):
    """The same model, of which the mask is in a container, beside a word."""

    def forward(self, ids: Tensor, extra: Mapping[str, Any]) -> Any:  # type: ignore[override]
        assert extra["kind"] == "sum"
        return super().forward(ids, extra["pair"][0], extra["pair"][1])


class Sentences:
    """Sentences with masks, and floating-point numbers beside the integers."""

    def __init__(self, how: str) -> None:
        self.how = how

    def build_model(self) -> nn.Module:
        return Nested() if self.how == "nested" else Reader()

    def dataset(self, split: str) -> pa.Table:
        rng = np.random.default_rng(len(split))
        columns = {
            "ids": rng.integers(0, 20, (60, LENGTH)),
            "mask": (rng.random((60, LENGTH)) < 0.7).astype("float32"),
            "bias": rng.normal(size=(60, 3)).astype("float32"),
            "label": rng.integers(0, 3, 60),
        }
        return pa.table({name: pa.array(list(values)) for name, values in columns.items()})

    def to_batch(self, columns: pa.Table) -> dict[str, Any]:
        ids, mask, bias = (to_tensor(columns[name]) for name in ("ids", "mask", "bias"))
        inputs: Any = {
            "tuple": (ids, mask, bias),
            "mapping": {"mask": mask, "ids": ids},
            "nested": {"ids": ids, "extra": {"kind": "sum", "pair": (mask, bias)}},
        }[self.how]
        return {"inputs": inputs, "others": {"label": to_tensor(columns["label"])}}

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return functional.cross_entropy(outputs["logits"], batch["others"]["label"])

    def metrics(self, outputs: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"accuracy": (outputs["logits"].argmax(1) == batch["others"]["label"]).double().mean()}


@cache
def plain(how: str) -> LaidOut:
    return train_plainly(Sentences(how), steps=STEPS)


def trained(task: Any, *, network: Any = None, exchange: Any = None, **train: Any) -> LaidOut:
    return train_laid_out(lambda: task, layout_settings(network, exchange, steps=STEPS, **train))


EVERY = [("tuple", layout) for layout in LAYOUTS]
MAPPED = [("mapping", layout) for layout in ("one", "ZeRO-3", "pipeline 2 x data 2", "tensor 2", "recomputed chain")]
"""Names are the same code under replicas, in one pipeline and around blocks as the places of a tuple."""
NESTED = [("nested", layout) for layout in ("one", "data 3", "pipeline 2", "tensor 2")]
"""Containers within containers are the same code in every layout."""


@pytest.mark.parametrize(("how", "layout"), EVERY + MAPPED + NESTED)
def test_several_inputs_train_as_in_plain_pytorch(how: str, layout: str) -> None:
    right = plain(how)
    found = trained(Sentences(how), **LAYOUTS[layout])
    assert found.losses == pytest.approx(right.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, right.weights) <= 1e-12
    assert 0 <= found.outcome.final["validation"]["accuracy"] <= 1


def test_workers_of_parameter_servers_call_a_model_with_several_inputs(tmp_path: Path) -> None:
    right = plain("mapping")
    found = train_central(lambda: Sentences("mapping"), central_settings(2, {"shards": 2}, steps=STEPS), tmp_path)
    assert furthest(found.weights, right.weights) <= 1e-12


class Listed(Sentences):
    """A task that lists the layers of its model, of which the first takes all inputs."""

    def build_model(self) -> nn.Module:
        return Chain()

    def layers(self, model: nn.Module) -> Any:
        return [model.first, *model.rest]  # type: ignore[misc]

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return super().loss({"logits": outputs}, batch)

    def metrics(self, outputs: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = First()
        self.rest = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        found: Tensor = self.rest(self.first(*inputs, **named))
        return found


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        return (self.words(ids) * mask[..., None]).sum(1)


@pytest.mark.parametrize("how", ["tuple", "mapping"])
def test_the_first_of_the_layers_that_a_task_lists_gets_all_inputs(how: str) -> None:
    right = train_plainly(Listed(how), steps=STEPS)
    found = trained(Listed(how), network={"pipeline": 2})
    assert furthest(found.weights, right.weights) <= 1e-12


class Changing(Sentences):
    """A task whose inputs lose a part after the first rows."""

    def to_batch(self, columns: pa.Table) -> dict[str, Any]:
        batch = super().to_batch(columns)
        if columns.num_rows > 1:
            batch["inputs"] = batch["inputs"][:2]
        return batch


def test_inputs_of_another_form_than_those_that_a_pipeline_was_cut_by_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"a tuple of a tensor of shape .* have another form"):
        trained(Changing("tuple"), network={"pipeline": 2})
    assert len(trained(Changing("tuple")).losses) == STEPS, "without a pipeline they may change"


@pytest.mark.parametrize("made", [lambda batch: (batch["inputs"], batch["others"]), lambda batch: batch["others"]])
def test_a_batch_that_is_no_dictionary_with_inputs_is_refused(made: Any) -> None:
    task = Sentences("tuple")
    task.to_batch = lambda columns: made(Sentences.to_batch(task, columns))  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="must return a dictionary whose entry 'inputs'"):
        trained(task)


def test_a_config_is_checked_by_the_inputs_of_the_first_row(tmp_path: Path) -> None:
    with mock.patch.object(validated.tasks, "build", side_effect=lambda _: Sentences("mapping")):
        config = {
            "name": "x",
            "task": {"type": "digits"},
            "train": {"steps": 1, "batch_size": 8, "optimizer": {"type": "sgd", "lr": 0.1}},
        }
        assert validated.layout_problems(load_train_config({**config, "strategy": {"network": {"pipeline": 2}}})) == []
        (problem,) = validated.layout_problems(load_train_config({**config, "strategy": {"network": {"pipeline": 40}}}))
    assert "layers" in problem


class Words(UserDict[str, Tensor]):
    """A mapping that torch does not know, such as what a tokenizer returns."""


def test_a_call_is_that_of_a_user() -> None:
    def model(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    x, y = torch.ones(2), torch.zeros(2)
    packed = nn.utils.rnn.pack_sequence([x, y])
    called: Any = model
    assert call(called, x) == ((x,), {})
    assert call(called, (x, y)) == call(called, [x, y]) == ((x, y), {})
    assert call(called, {"a": x, "b": 3}) == ((), {"a": x, "b": 3})
    assert call(called, Words(a=x)) == ((), {"a": x})
    assert call(called, packed) == ((packed,), {})


def test_inputs_have_names_and_are_filled_again_in_their_form() -> None:
    x, y, z = torch.ones(2), torch.zeros(2), torch.zeros(3)
    for inputs, names in (
        (x, ["inputs"]),
        ((x, y), ["inputs_0", "inputs_1"]),
        ({"b": x, "a": y}, ["a", "b"]),
        (({"left": x, "right": [y, 2]},), ["inputs.left", "inputs.right.0"]),
        (Words(a=x, b=y), ["a", "b"]),
    ):
        form = InputForm(inputs)
        assert form.names == names
        tensors = form.tensors(inputs)
        again = InputForm(form.filled(tensors))
        assert again.names == names
        assert all(mine is theirs for mine, theirs in zip(again.tensors(form.filled(tensors)), tensors, strict=True))
    form = InputForm({"a": x, "kind": "sum"})
    form.tensors({"kind": "sum", "a": z})
    for other in ({"a": x, "kind": "mean"}, {"a": x}, {"a": [x], "kind": "sum"}, x, {"a": None, "kind": "sum"}):
        with pytest.raises(TrainingError, match="have another form"):
            form.tensors(other)
