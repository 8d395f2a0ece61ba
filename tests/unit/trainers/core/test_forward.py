"""Passes of replicas that have no sample: the result is that of plain PyTorch, whatever the model can take."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import TrainingError
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.plain import train_plainly
from support.training import Rows, furthest, order_of

LENGTH, WIDTH, RATE = 4, 6, 0.01
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {"network": {"data": 2, "microbatches": None}},
    "data 3, accumulate 2": {"network": {"data": 3, "microbatches": None}, "accumulate": 2},
    "ZeRO-2": {"network": {"data": 2, "microbatches": None}, "exchange": {"shard": "gradients"}},
    "ZeRO-3": {"network": {"data": 2, "microbatches": None}, "exchange": {"shard": "parameters"}},
    "pipeline 2": {"network": {"data": 2, "pipeline": 2, "microbatches": 1, "schedule": "1f1b"}},
    "zero bubble": {"network": {"data": 2, "pipeline": 2, "microbatches": 1, "schedule": "zbv"}},
    "recomputed": {"network": {"data": 2, "microbatches": None}, "recompute": "blocks"},
}


class Viewed(nn.Module):
    """A model that does with its batch what cannot be done without samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.body = nn.Sequential(nn.Conv1d(1, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH)) for _ in range(2))
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH * LENGTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x.view(x.size(0), 1, -1))
        for block in self.blocks:
            x = x + block(x)
        if self.how == "packed":
            lengths = torch.full((x.size(0),), LENGTH)
            packed = nn.utils.rnn.pack_padded_sequence(x.mT, lengths, batch_first=True)
            x = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0]
        elif self.how == "max":
            x = x + 0 * x.max(0).values
        elif self.how == "rows":
            x = torch.stack([row * 2 for row in x])
        found: Tensor = self.head(x.reshape(x.size(0), -1))
        return found


class Pictures:
    def __init__(self, how: str, rows: int = 25) -> None:
        self.how, self.rows = how, rows

    def build_model(self) -> nn.Module:
        return Viewed(self.how)

    def dataset(self, split: str) -> pa.Table:
        rng = np.random.default_rng(len(split))
        inputs, targets = rng.normal(size=(self.rows, LENGTH)), rng.normal(size=self.rows)
        return pa.table({"inputs": pa.array(list(inputs)), "targets": targets})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {name: to_tensor(columns[name]) for name in ("inputs", "targets")}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(outputs[:, 0], batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


class Undefined(Pictures):
    """A task whose loss is not a number for the first sample of the data alone, and nor are its gradients."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        apart = (outputs[:, 0] - batch["targets"]).square()
        is_first = batch["targets"] == self.dataset("train")["targets"][0].as_py()
        return apart.mean() * (0 / (~is_first).sum() + 1)


def trained(task: Any, *, network: Any = None, exchange: Any = None, **train: Any) -> LaidOut:
    chosen = {"batch_size": 12, "steps": 6, "optimizer": {"type": "sgd", "lr": RATE}, **train}
    return train_laid_out(lambda: task, layout_settings(network, exchange, **chosen))


def plain(task: Any, steps: int = 6) -> LaidOut:
    return train_plainly(task, lambda parameters: torch.optim.SGD(parameters, lr=RATE), batch_size=12, steps=steps)


def of_one_process(task: Any, accumulate: int = 1) -> LaidOut:
    """Return what plain PyTorch comes to; micro-batches have statistics of their own, so they need one worker here."""
    if accumulate == 1:
        return plain(task)
    return trained(task, network={"microbatches": None}, accumulate=accumulate)


# Of the last batch all but one replica have no sample.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_without_a_sample_of_the_last_batch_change_nothing(layout: str) -> None:
    accumulate = LAYOUTS[layout].get("accumulate", 1)
    task = Pictures("view", rows=24 + accumulate)
    right = of_one_process(task, accumulate)
    found = trained(task, **LAYOUTS[layout])
    assert found.losses == pytest.approx(right.losses, rel=0, abs=1e-10)
    assert furthest(found.weights, right.weights) <= 1e-10
    assert found.weights["body.1.num_batches_tracked"] == 6 * accumulate


def test_a_pipeline_with_batch_normalisation_in_its_first_stage_alone_goes_on_without_samples() -> None:
    task = Pictures("view", rows=26)  # the last batch has two samples
    first = [nn.Linear(LENGTH, 4), nn.BatchNorm1d(4), nn.Tanh()]
    layers = nn.Sequential(*first, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    task.build_model = lambda: copy.deepcopy(layers)  # type: ignore[method-assign]
    network = {"data": 3, "pipeline": 2, "microbatches": 1, "split": "equal"}
    assert furthest(trained(task, network=network).weights, plain(task).weights) <= 1e-10


@pytest.mark.parametrize("how", ["packed", "max", "rows"])
def test_models_that_take_no_empty_batch_need_not(how: str) -> None:
    found = trained(Pictures(how), steps=3, **LAYOUTS["data 2"])
    assert furthest(found.weights, plain(Pictures(how), steps=3).weights) <= 1e-10


@pytest.mark.parametrize("layout", ["data 2", "pipeline 2", "ZeRO-2", "ZeRO-3"])
def test_a_loss_that_is_no_number_for_one_sample_alone_harms_nothing(layout: str) -> None:
    task = Undefined("view")
    loss = task.loss(torch.zeros(1, 1), {"targets": to_tensor(task.dataset("train")["targets"].slice(0, 1))})
    assert loss.isnan()
    assert furthest(trained(task, **LAYOUTS[layout]).weights, plain(task).weights) <= 1e-10


@dataclass
class Answer:
    """Outputs of a kind that torch does not look into."""

    values: Tensor


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LENGTH, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.net(x))


class Picky(Pictures):
    """A task whose outputs are of a class of its own. Of the first batch only the first replica's samples count."""

    def __init__(self) -> None:
        super().__init__("view")
        self.left_out = to_tensor(self.dataset("train")["targets"].take(order_of(self.rows, seed=0, epoch=0)[6:12]))

    def build_model(self) -> nn.Module:
        return Answering()

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (~torch.isin(batch["targets"], self.left_out)).sum()

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        counts = ~torch.isin(batch["targets"], self.left_out)
        return (outputs.values[:, 0] - batch["targets"])[counts].square().mean()


def test_outputs_that_hide_their_tensors_are_refused_where_a_share_has_weight_0() -> None:
    with pytest.raises(TrainingError, match=r"weight 0 .* a Answer, hide their tensors.*train\.batch_norm to local"):
        trained(Picky(), **LAYOUTS["data 2"])
    assert len(trained(Picky(), batch_norm="local", steps=2, **LAYOUTS["data 2"]).losses) == 2


class Failing(Pictures):
    """A task whose model fails on the first sample alone."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if len(outputs) == 1 and batch["targets"][0] == self.dataset("train")["targets"][0].as_py():
            raise ValueError("one is too few")
        return super().loss(outputs, batch)


@pytest.mark.parametrize("layout", ["data 2", "pipeline 2"])
def test_what_fails_in_a_pass_that_does_not_count_is_told_with_its_step(layout: str) -> None:
    with pytest.raises(TrainingError, match=r"failed at step 3 on worker \d: ValueError: one is too few \(.*line"):
        trained(Failing("view"), **LAYOUTS[layout])


def test_a_last_batch_of_one_value_a_channel_names_the_key_that_drops_it() -> None:
    task = Pictures("view")
    task.build_model = lambda: nn.Sequential(nn.Linear(LENGTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))  # type: ignore[method-assign]
    for layout in ({}, LAYOUTS["data 2"]):
        with pytest.raises(TrainingError, match=r"more than 1 value per channel.*set train\.drop_last to true"):
            trained(task, **layout)
        assert len(trained(task, drop_last=True, **layout).losses) == 6


def test_a_share_of_one_value_a_channel_in_evaluation_names_the_layers_that_normalise_there() -> None:
    task = Pictures("view")
    layers = [nn.Linear(LENGTH, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 1)]
    task.build_model = lambda: nn.Sequential(*layers)  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"more than 1 value per channel.*take track_running_stats=False out"):
        trained(task, drop_last=True)


WRONG: dict[str, Any] = {
    "a dict": lambda loss: {"loss": loss},
    "a NoneType": lambda loss: None,
    r"a tensor of shape \(2,\)": lambda loss: torch.stack([loss, loss]),
    r"a tensor of torch\.complex128": lambda loss: loss * 1j,
}


@pytest.mark.parametrize("layout", [{}, LAYOUTS["data 2"], LAYOUTS["pipeline 2"]], ids=["alone", "data", "pipeline"])
@pytest.mark.parametrize("got", WRONG)
def test_a_loss_that_is_not_one_number_is_refused_on_any_number_of_workers(got: str, layout: dict[str, Any]) -> None:
    task = Pictures("view")
    loss = task.loss
    task.loss = lambda outputs, batch: WRONG[got](loss(outputs, batch))  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=rf"loss must be a scalar tensor.* returned {got}"):
        trained(task, **layout)


def test_a_metric_that_is_not_one_number_is_refused_by_its_name() -> None:
    task = Pictures("view")
    task.metrics = lambda outputs, batch: {"shape": outputs.shape}  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"metric 'shape' must be one number.* it is a Size"):
        trained(task)


@pytest.mark.parametrize("layout", [{}, LAYOUTS["data 2"], LAYOUTS["pipeline 2"]], ids=["alone", "data", "pipeline"])
def test_a_loss_without_a_gradient_is_refused_with_what_to_do(layout: dict[str, Any]) -> None:
    task = Pictures("view")
    loss = task.loss
    task.loss = lambda outputs, batch: loss(outputs.detach(), batch)  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"does not depend on a parameter that is trained.* not from \.detach"):
        trained(task, **layout)


_GRADIENTS = """
import sys, torch
from orchestray.trainers.core.forward import Forward
for weight in (1.0, 0.25):
    model = torch.nn.Linear(1, 1, bias=False)
    forward = Forward(None, model, "float32", torch.device("cpu"))
    forward.backward(model(torch.full((1, 1), 3.0)).sum(), weight)
    print(model.weight.grad.item(), "sympy" in sys.modules)
"""


def test_a_gradient_of_the_whole_loss_imports_no_sympy_and_is_that_of_its_weight() -> None:
    done = subprocess.run([sys.executable, "-c", _GRADIENTS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "3.0 False"
    assert done.stdout.splitlines()[1].startswith("0.75 ")


class Thawing(nn.Module):
    """A model that lets a layer be trained from its third pass on."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4).requires_grad_(early), nn.Linear(4, 2)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes > 2:
            self.first.requires_grad_(True)
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y


@pytest.mark.parametrize("layout", ["one", "data 2", "ZeRO-3"])
def test_a_layer_that_was_frozen_at_the_start_and_is_trained_later_is_refused_by_name(layout: str) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(24, 3)), rng.integers(0, 2, size=24)
    settings = layout_settings(batch_size=8, **LAYOUTS.get(layout, {"network": {"microbatches": None}}))
    with pytest.raises(TrainingError, match=r"The parameter 'first\.weight' was frozen when the training began"):
        train_laid_out(lambda: Rows(inputs, targets, lambda: Thawing(False)), settings)
    trained = train_laid_out(lambda: Rows(inputs, targets, lambda: Thawing(True)), settings)
    assert len(trained.losses) == 3


class Making(nn.Module):
    """A model whose first pass makes a layer, or replaces a parameter."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.made, self.begun = made, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun and self.made == "first.weight":
            self.first.weight = nn.Parameter(self.first.weight.detach() / 2)
        elif not self.begun and self.made == "late.bias":
            self.late = nn.Linear(4, 2).to(x.dtype)
        self.begun = True
        y: Tensor = getattr(self, "late", self.last)(torch.tanh(self.first(x)))
        return y


@pytest.mark.parametrize("layout", ["one", "data 2", "ZeRO-3", "pipeline 2"])
@pytest.mark.parametrize("made", ["late.bias", "first.weight"])
def test_a_parameter_that_a_pass_has_made_is_refused_by_name(made: str, layout: str) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(24, 3)), rng.integers(0, 2, size=24)
    settings = layout_settings(batch_size=8, **LAYOUTS.get(layout, {"network": {"microbatches": None}}))

    def task(made: str) -> Rows:
        return Rows(inputs, targets, lambda: nn.Sequential(Making(made), nn.Linear(2, 2)))

    with pytest.raises(TrainingError, match=r"has made the parameter '0\.(late|first)\."):
        train_laid_out(lambda: task(made), settings)
    assert len(train_laid_out(lambda: task(""), settings).losses) == 3


@pytest.mark.parametrize("network", [{"microbatches": None}, {"data": 2}, {"pipeline": 2}, {"tensor": 2}], ids=str)
def test_a_batch_of_other_numbers_than_the_model_s_is_told_with_what_to_do(network: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(24, 3)), rng.integers(0, 2, size=24)
    settings = layout_settings(network, batch_size=8, precision="float32")
    told = r"The model or its loss failed at step 1 on worker [01]: RuntimeError: .*Double and Float.* \(\.float\(\)\)"
    with pytest.raises(TrainingError, match=told):
        train_laid_out(lambda: Rows(inputs, targets, lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))), settings)


class Sifting(Rows):
    """A task that leaves rows out of its batches."""

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        batch = super().to_batch(columns)
        return {name: value[batch["targets"] > 0] for name, value in batch.items()}


def test_a_batch_of_which_to_batch_leaves_nothing_is_told_so() -> None:
    task = Sifting(np.ones((24, 3)), np.zeros(24, np.int64), lambda: nn.Linear(3, 2))
    told = r"loss became nan at step 1 .* to_batch has left all of them out: leave out in dataset\('train'\)"
    with pytest.raises(TrainingError, match=told):
        train_laid_out(lambda: task, layout_settings({"microbatches": None}, batch_size=8))
