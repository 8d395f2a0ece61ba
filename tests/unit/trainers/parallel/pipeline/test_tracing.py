"""Recording of models, in both modes; what cannot be recorded is named with the user's file and line."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.pipeline.cutting import layers_of
from support.cut_models import build, run_chain, vectors

NO_TASK: Any = SimpleNamespace()


class Parts(nn.Module):
    """Two layers, between which a test's own code runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))
        self.flag = True


class DataDependent(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:  # cannot be traced
            x = x + 1
        return self.second(x)


class Looping(Parts):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):  # cannot be traced
            x = self.first(x)
        return self.second(x)


class Setting(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.last = x  # cannot be traced
        return self.second(x)


class Reading(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x * float(self.count)  # cannot be traced
        return self.second(x)


class TwoModes(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            x = x.relu()  # cannot be traced
        return self.second(x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2  # cannot be traced

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


class Custom(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(Double.apply(self.first(x)))


class Autocast(Parts):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)  # cannot be traced
        return self.second(x)


class Failing(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x[: int(x.shape[0])])  # cannot be traced


UNTRACEABLE = [DataDependent, Looping, Setting, Reading, TwoModes, Custom, Autocast, Failing]
REASONS = {
    DataDependent: "which way it goes depends on the data",
    Setting: "it sets self.last in forward",
    Reading: "it makes a Python number of a value that is known only when it runs",
    Looping: "its forward pass asks for values that are known only when it runs: TypeError",
    TwoModes: "it does one thing in training and another in evaluation",
    Custom: "it calls a torch.autograd.Function of its own",
    Failing: "it makes a Python number of a value",
    Autocast: "it changes autocast or inference mode in forward",
}


def line_of(kind: type[nn.Module]) -> int:
    """Return the line of this file that is marked, in the class, or in the function it calls."""
    marked = Double if kind is Custom else kind
    lines = Path(__file__).read_text().split("\n")
    start = next(index for index, line in enumerate(lines) if line.startswith(f"class {marked.__name__}("))
    return 1 + next(i for i in range(start, len(lines)) if lines[i].endswith("  # cannot be traced"))


@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_what_cannot_be_traced_is_named_by_file_and_line_with_what_to_do(kind: type[nn.Module]) -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of(NO_TASK, kind())
    text = str(caught.value)
    assert f"{__file__}, line {line_of(kind)}: " in text
    assert REASONS[kind] in text
    assert "layers(model)" in text
    assert "nn.Sequential" in text


@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_the_model_is_as_before_whether_it_could_be_traced_or_not(kind: type[nn.Module]) -> None:
    model = kind().eval()
    model.first.train()  # type: ignore[union-attr]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    with pytest.raises(ConfigError):
        layers_of(NO_TASK, model)
    assert type(model) is kind
    assert type(model.first) is nn.Linear
    assert [module.training for module in model.modules()] == [False, True, False]
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_a_part_that_cannot_be_traced_stays_whole_and_says_why(kind: type[nn.Module]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.parts, self.head = nn.Linear(6, 6), nn.ModuleList([kind(), kind()]), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for part in self.parts:
                x = part(x) + x
            return self.head(x)

    layers = layers_of(NO_TASK, Model(), at_least=10)
    assert layers.names == ["stem", "parts.0", "parts.1", "head"]
    assert f"{__file__}, line {line_of(kind)}" in layers.whole["parts.1"]
    layers.check_count(4)
    with pytest.raises(ConfigError, match=r"has 4 layers .* too few for 5 stages.* no more: parts\.[01]: ") as caught:
        layers.check_count(5)
    assert f"{__file__}, line {line_of(kind)}" in str(caught.value)


class Constants(nn.Module):
    """A model of all that a tracer may compute too early: new tensors, random numbers, sizes, modes, no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("table", torch.randn(9, 6), persistent=False)
        self.plain = torch.randn(6)

    def forward(self, x: Tensor) -> Tensor:
        half, (rows, width) = x.shape[1] // 2, x.shape
        x = self.first(x) + torch.rand(6) + self.plain.to(x.dtype) + self.table[:rows].detach()
        mask = torch.zeros(6, dtype=torch.bool)
        mask[:half] = True
        with torch.no_grad():
            target = self.second(x).softmax(-1) * self.second.weight.norm()
        x = self.second(torch.where(mask, x, -x))
        assert x.shape[1] == width and width > 2, "wrong"  # noqa: PT018 - a model's own
        scale = self.first.weight.T.sum(0) * (0.5 if self.training else 2.0)
        return torch.nn.functional.dropout(x * scale + target, 0.5, self.training).reshape(rows, half, -1).to(x.dtype)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_tensors_made_in_forward_are_made_anew_in_the_mode_of_the_moment(training: bool, cut: int) -> None:
    torch.manual_seed(0)
    model = Constants().double().train(not training)
    layers = layers_of(NO_TASK, model)
    assert layers.names == ["first", "second", "second@2"]
    stages = [layers.stage(*bound) for bound in ([(0, 3)] if cut == 0 else [(0, cut), (cut, 3)])]
    model.train(training)
    for stage in stages:
        assert stage.state_dict().keys() <= model.state_dict().keys()
        stage.train(training)
    for rows in (2, 5):
        x = torch.randn(rows, 6, dtype=torch.float64)
        gradients = []
        outputs = []
        for run in (lambda x=x: model(x), lambda x=x: run_chain(stages, x)):
            model.zero_grad()
            torch.manual_seed(rows)
            outputs.append(run())
            if not gradients:
                (outputs[0] ** 2).mean().backward()
            gradients.append([p.grad.clone() if p.grad is not None else None for p in model.parameters()])
        assert torch.equal(*outputs)
        for ours, theirs in zip(*gradients, strict=True):
            assert ours is not None
            torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-14)


def test_what_is_asserted_of_sizes_is_asserted_of_each_batch() -> None:
    layers = layers_of(NO_TASK, build("tied_attention"))
    stage = layers.stage(0, 1)
    stage(torch.zeros(2, 16, dtype=torch.int64))
    with pytest.raises(AssertionError, match=r"cut_models\.py, line"):
        stage(torch.zeros(2, 17, dtype=torch.int64))


class Cycle:
    """Garbage that only the collector frees, and whose finalizer works with tensors, as those of data loaders do."""

    def __init__(self) -> None:
        self.itself = self
        weakref.finalize(self, torch.zeros, 3)


class Making(Parts):
    """A model whose forward makes objects enough to start the collector."""

    def forward(self, x: Tensor) -> Tensor:
        made = [[number] for number in range(2000)]
        return self.second(self.first(x)) * len(made)


def test_what_the_collector_finalizes_meanwhile_is_no_part_of_the_model() -> None:
    model, thresholds = Making(), gc.get_threshold()
    gc.set_threshold(1000, 1, 1)
    try:
        for _ in range(3):
            Cycle()
            layers_of(NO_TASK, model)
    finally:
        gc.set_threshold(*thresholds)


def test_tracing_does_not_disturb_models_that_run_in_other_threads() -> None:
    other, x = build("residual"), vectors()
    other.eval()
    expected = other(x)
    stop, wrong = threading.Event(), []

    def run() -> None:
        while not stop.is_set():
            if not torch.equal(other(x), expected):
                wrong.append("another result")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(5):
            layers_of(NO_TASK, build("residual"), at_least=8)
    finally:
        stop.set()
        thread.join()
    assert not wrong
