"""Metrics of the whole validation set, whatever it is cut into."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import ConfigError, TrainingError
from support.layouts import layout_settings, train_laid_out
from support.training import Rows, train

LAYOUTS: dict[str, dict[str, Any]] = {
    "data 3": {"network": {"data": 3}},
    "pipeline 2, data 2": {"network": {"data": 2, "pipeline": 2}},
    "ZeRO-3": {"network": {"data": 2}, "exchange": {"shard": "parameters"}},
}


class Judged(Rows):
    """A task whose metrics cannot be means: F1, the area under the ROC curve, and the root of the mean square."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        inputs = rng.normal(size=(53, 4))
        targets = (inputs.sum(1) + rng.normal(size=53) > 1).astype(np.int64)
        super().__init__(inputs, targets, lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
        right, said = batch["targets"] == 1, outputs.argmax(1) == 1
        counts = torch.stack([(right & said).sum(), (right & ~said).sum(), (~right & said).sum()])
        score = outputs[:, 1] - outputs[:, 0]
        return {
            "counts": counts,
            "square": score.square().sum(),
            "scores": [score],
            "labels": [right],
            "num": len(score),
        }

    def final_metrics(self, totals: dict[str, Tensor]) -> dict[str, Any]:
        hit, missed, wrong = totals["counts"].tolist()
        positive, negative = totals["scores"][totals["labels"]], totals["scores"][~totals["labels"]]
        return {
            "f1": 2 * hit / (2 * hit + missed + wrong),
            "auc": (positive[:, None] > negative).double().mean(),
            "root": math.sqrt(totals["square"] / totals["num"]),
        }


def judged_at_once(task: Judged, weights: dict[str, Tensor]) -> dict[str, float]:
    model = task.build_model().double()
    model.load_state_dict(weights)
    with torch.no_grad():
        batch = task.to_batch(task.table)
        outputs = model(batch["inputs"])
    found = {
        name: torch.as_tensor(v[0] if isinstance(v, list) else v) for name, v in task.metrics(outputs, batch).items()
    }
    loss = float(functional.cross_entropy(outputs, batch["targets"]))
    return {"loss": loss, **{name: float(value) for name, value in task.final_metrics(found).items()}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_from_totals_are_those_of_the_whole_set(layout: str) -> None:
    task, config = Judged(), dict(LAYOUTS[layout])
    network, exchange = config.pop("network"), config.pop("exchange", None)
    found = train_laid_out(lambda: task, layout_settings(network, exchange, steps=2, batch_size=8))
    assert found.outcome.final["validation"] == pytest.approx(judged_at_once(task, found.weights), rel=1e-9)


def test_totals_are_right_with_one_worker_too() -> None:
    task = Judged()
    (found,) = train(task, steps=2, batch_size=8)
    assert found.outcome.final["validation"] == pytest.approx(judged_at_once(task, found.after), rel=1e-9)


def test_final_metrics_that_are_no_numbers_are_refused_with_what_came() -> None:
    task = Judged()
    task.final_metrics = lambda totals: totals["counts"]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="must return a dict of numbers"):
        train(task, steps=1)


@pytest.mark.parametrize("values", [[0.5, 1.0], [torch.tensor(1.0)]], ids=["numbers", "a tensor without dimensions"])
def test_totals_in_lists_that_cannot_be_joined_are_refused(values: list[Any]) -> None:
    task = Judged()
    task.metrics = lambda outputs, batch: {"scores": values}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"a list for 'scores' that holds .*Return a list of one tensor"):
        train_laid_out(lambda: task, layout_settings({"microbatches": None}, steps=2))


@pytest.mark.parametrize("method", ["metrics", "final_metrics"])
@pytest.mark.parametrize("name", ["step", "epoch", "time_s", "split", "event"])
def test_a_metric_that_would_take_the_place_of_a_key_of_its_line_is_refused(name: str, method: str) -> None:
    task = Judged()
    setattr(task, method, lambda *_: {name: 0.5})
    with pytest.raises(ConfigError, match=rf"{method} returned a metric of the name '{name}'.* another name"):
        train_laid_out(lambda: task, layout_settings({"microbatches": None}, steps=1))


def test_metrics_that_are_no_dict_are_refused_and_names_become_text() -> None:
    task = Judged()
    task.metrics = lambda outputs, batch: None  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ConfigError, match="metrics must return a dict of numbers; it returned None"):
        train_laid_out(lambda: task, layout_settings({"microbatches": None}, steps=1))
    task.metrics = lambda outputs, batch: {1: 0.5}  # type: ignore[method-assign,assignment,return-value]
    task.final_metrics = None  # type: ignore[method-assign,assignment]
    found = train_laid_out(lambda: task, layout_settings({"microbatches": None}, steps=1))
    assert found.outcome.final["validation"]["1"] == 0.5


def test_a_metric_called_loss_takes_the_place_of_the_mean_loss() -> None:
    task = Judged()
    task.final_metrics = None  # type: ignore[method-assign,assignment]
    task.metrics = lambda *_: {"loss": 0.25}  # type: ignore[method-assign]
    found = train_laid_out(lambda: task, layout_settings({"microbatches": None}, steps=1))
    assert found.outcome.final["validation"] == {"loss": 0.25}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_metric_of_some_batches_alone_is_refused_and_a_total_of_some_is_not(replicas: int) -> None:
    def some(outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"of some": 1.0} if batch["inputs"][0, 0] > 0 else {}

    task = Judged()
    task.metrics = some  # type: ignore[method-assign]
    task.final_metrics = lambda totals: {"counted": totals["of some"]}  # type: ignore[method-assign]
    settings = layout_settings({"data": replicas, "microbatches": None}, steps=1, batch_size=8)
    assert train_laid_out(lambda: task, settings).outcome.final["validation"]["counted"] > 0
    task.final_metrics = None  # type: ignore[method-assign,assignment]
    with pytest.raises(TrainingError, match=r"metrics returned 'of some' for some batches.*final_metrics"):
        train_laid_out(lambda: task, settings)


def test_a_metric_of_some_replicas_alone_is_refused() -> None:
    task = Judged()
    task.metrics = lambda outputs, batch: {f"of {len(outputs)}": 1.0}  # type: ignore[method-assign]
    task.final_metrics = None  # type: ignore[method-assign,assignment]
    settings = layout_settings({"data": 2, "microbatches": None}, steps=1, batch_size=53)  # of 27 and 26 samples
    with pytest.raises(TrainingError, match=r"metrics returned 'of 26' for some batches"):
        train_laid_out(lambda: task, settings)


class Failing(Judged):
    """A task of which one method fails in evaluation: a metric, or the loss in the check of the first batch."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self._method == "loss" and not outputs.requires_grad:
            raise ValueError("nothing to measure")
        return super().loss(outputs, batch)

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
        raise ValueError("nothing to measure")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("method", "of"), [("metric", "The model, its loss or a metric"), ("loss", "The model or its loss")]
)
def test_code_that_fails_in_an_evaluation_is_reported_with_its_file_and_line(method: str, of: str, layout: str) -> None:
    place = rf"{of} failed at step 1 on worker \d: ValueError: nothing to measure \(.*test_evaluation\.py, line \d+\)"
    with pytest.raises(TrainingError, match=place):
        train_laid_out(lambda: Failing(method), layout_settings(**LAYOUTS[layout], steps=1))
