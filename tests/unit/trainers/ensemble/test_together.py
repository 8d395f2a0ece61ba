"""An ensemble as one model: its loss by hand, its answers, and the single process's result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import ConfigError
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.ensemble.answers import mean_over
from orchestray.trainers.ensemble.ensemble import Ensemble, log_mean_of
from orchestray.trainers.ensemble.together import EnsembleLossTask
from support.configs import GOOD, problems_of
from support.layouts import layout_settings, train_laid_out
from support.training import digits, few_digits, furthest, regression, train

AVERAGES = ("outputs", "probabilities")


def together(weight: float = 0.5, average: Any = "probabilities", members: int = 3, **task: Any) -> EnsembleLossTask:
    return EnsembleLossTask(digits(**{"hidden": [16], **task}), members=members, weight=weight, average=average)


def some_batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"inputs": torch.rand(9, 64), "targets": torch.arange(9)}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_is_the_weighted_sum_of_the_answers_and_of_the_members(weight: float, average: str) -> None:
    task, batch = together(weight, average), some_batch()
    model: Any = task.build_model().train()
    logits = torch.stack([member(batch["inputs"]) for member in model.members])
    mean = logits.mean(0) if average == "outputs" else logits.softmax(2).mean(0).log()
    own = torch.stack([functional.cross_entropy(each, batch["targets"]) for each in logits]).mean()
    expected = weight * functional.cross_entropy(mean, batch["targets"]) + (1 - weight) * own
    found = task.loss(model(batch["inputs"]), batch)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    parameters = list(model.parameters())
    for one, two in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-6)


def test_a_class_below_the_smallest_probability_has_its_loss_and_moves_each_member() -> None:
    logits = [torch.tensor([[0.0, 200.0]], requires_grad=True), torch.tensor([[0.0, 300.0]], requires_grad=True)]
    loss = functional.cross_entropy(log_mean_of(logits), torch.tensor([0]))
    assert loss.item() == pytest.approx(200 + math.log(2))
    first, second = torch.autograd.grad(loss, logits)
    assert torch.allclose(first, torch.tensor([[-1.0, 1.0]]))
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("average", AVERAGES)
def test_in_evaluation_it_answers_as_the_ensemble_of_its_members_who_begin_apart(average: Any) -> None:
    task, batch = together(1.0, average), some_batch()
    model: Any = task.build_model().eval()
    with torch.no_grad():
        answer = model(batch["inputs"])
        assert torch.equal(answer, Ensemble(model.members, average).logits(batch["inputs"]))
        assert torch.equal(task.loss(answer, batch), functional.cross_entropy(answer, batch["targets"]))
        first, second, _ = (member(batch["inputs"]) for member in model.members)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("network", "exchange"),
    [
        ({"data": 3}, {}),
        ({"data": 2}, {"shard": "optimizer"}),
        ({"data": 2}, {"shard": "parameters"}),
        ({"tensor": 2}, {}),
        ({"data": 2, "tensor": 2}, {}),
    ],
)
def test_a_layout_is_the_single_process(network: dict[str, Any], exchange: dict[str, Any]) -> None:
    def task() -> EnsembleLossTask:
        return EnsembleLossTask(few_digits(), members=2, weight=0.7, average="probabilities")

    train: dict[str, Any] = {"steps": 3, "validate_every_steps": 3}
    one = train_laid_out(task, layout_settings(**train))
    found = train_laid_out(task, layout_settings(network, exchange, **train))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12
    assert found.validation == pytest.approx(one.validation, rel=0, abs=1e-12)


def disagreement(make: Callable[[], EnsembleLossTask], seed: int) -> tuple[float, float]:
    """Return the rate at which two members choose different classes, and the accuracy of the answer."""
    settings = layout_settings(
        {"microbatches": 1}, precision="float32", batch_size=64, steps=60, validate_every_steps=60, seed=seed
    )
    found = train_laid_out(make, settings)
    model: Any = make().build_model()
    model.load_state_dict(found.weights)
    batch = make().to_batch(make().dataset("validation"))
    with torch.no_grad():
        chosen = torch.stack([member.eval()(batch["inputs"]).argmax(1) for member in model.members])
    pairs = [float((chosen[i] != chosen[j]).double().mean()) for i in range(len(chosen)) for j in range(i)]
    return sum(pairs) / len(pairs), float((found.outcome.final["validation"] or {})["accuracy"])


@pytest.mark.parametrize("seed", range(3))
def test_members_of_any_task_disagree_more_with_the_loss_of_their_answer(seed: int) -> None:
    apart, alike = (
        disagreement(lambda weight=weight: together(weight, hidden=[24, 24]), seed) for weight in (1.0, 0.0)
    )
    assert apart[0] > alike[0] + 0.02
    assert apart[1] > alike[1] - 0.03


def test_a_config_s_task_has_the_members_and_is_saved_with_them() -> None:
    config = load_train_config(GOOD, ["train.ensemble={members: 3}", "train.quantize={type: bnn}"])
    source = TaskSource.from_config(config.task, config.train)
    assert TaskSource.from_json(source.to_json()) == source
    model: Any = tasks.build(source).build_model()
    assert len(model.members) == 3
    assert all(set(member[0].weight.unique().tolist()) == {-1.0, 1.0} for member in model.members)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("strategy.network.pipeline=2", "strategy.network.pipeline: the members of train.ensemble stand beside"),
        ("train.ensemble.members=1", "train.ensemble.members"),
    ],
)
def test_what_does_not_go_with_members_is_refused(override: str, said: str) -> None:
    assert any(said in line for line in problems_of(GOOD, "train.ensemble={members: 2}", override))


def test_probabilities_of_one_number_are_refused_as_they_say_nothing() -> None:
    task = EnsembleLossTask(regression(12), members=2, weight=0.5, average="probabilities")
    with pytest.raises(ConfigError, match="the members answer with one number, whose softmax is always 1"):
        train(task, batch_size=12, optimizer={"type": "sgd", "lr": 0.1})
    with pytest.raises(ConfigError, match="use average: outputs"):
        mean_over(SoloCollective(), torch.ones(3, 1), "probabilities")
