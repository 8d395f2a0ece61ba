"""Consolidation (group F of the survey): ensembles, a loss that knows of the ensemble, distillation, a shared trunk."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from orchestray.trainers.distill.distillation import DistilledTask
from orchestray.trainers.ensemble.ensemble import Ensemble
from orchestray.trainers.tasks.digits import Digits
from orchestray.trainers.tasks.digits_networks import TreeNetDigits
from support.layouts import layout_settings, train_laid_out
from support.training import digits
from support.training import train as train_watched

SEEDS = range(3)
MEMBERS = 10


def settings(data: int = 1, exchange: dict[str, Any] | None = None, *, steps: int, **rest: Any) -> Any:
    chosen = {"precision": "float32", "batch_size": 64, "steps": steps, "validate_every_steps": steps, **rest}
    return layout_settings({"data": data, "microbatches": 1}, exchange, **chosen)


# -- ensemble learning -------------------------------------------------------------------------------------------------


def test_an_ensemble_is_at_least_as_accurate_as_its_mean_member_and_its_exchange_sends_nothing() -> None:
    gains = []
    for seed in SEEDS:
        trained = train_watched(
            digits(hidden=[32]),
            3,
            exchange={"type": "independent"},
            precision="float32",
            batch_size=64,
            steps=30,
            validate_every_steps=30,
            seed=seed,
            optimizer={"type": "sgd", "lr": 0.1, "momentum": 0.9},
        )
        assert [one.sent_by_exchange for one in trained] == [0, 0, 0]
        validation: Any = trained[0].outcome.final["validation"]
        gains.append(validation["accuracy"] - sum(member["accuracy"] for member in validation["members"]) / 3)
    assert all(gain >= 0 for gain in gains)
    assert sum(gains) > 0


# -- a loss that knows of the ensemble ---------------------------------------------------------------------------------


def of_tree(ensemble_weight: float, seed: int) -> tuple[float, float, float]:
    """Return the rate at which two members disagree, the ensemble's accuracy, and the members' mean accuracy."""

    def task() -> TreeNetDigits:
        return TreeNetDigits([24, 24], junction=1, members=3, ensemble_weight=ensemble_weight)

    found = train_laid_out(task, settings(steps=60, seed=seed))
    model = task().build_model()
    model.load_state_dict(found.weights)
    batch = task().to_batch(task().dataset("validation"))
    with torch.no_grad():
        logits: Tensor = model.eval()(batch["inputs"])
    chosen = logits.argmax(2)
    pairs = [(chosen[:, i] != chosen[:, j]).double().mean() for i in range(3) for j in range(i)]
    together = logits.softmax(2).mean(1).argmax(1) == batch["targets"]
    alone = chosen == batch["targets"].unsqueeze(1)
    return float(torch.stack(pairs).mean()), float(together.double().mean()), float(alone.double().mean())


def test_a_loss_on_the_averaged_answer_makes_members_disagree_and_rely_on_each_other() -> None:
    """Check Lee et al. 2015, section 4: with the ensemble's own loss instead of the members', they grow apart.

    Alone they are worse, and the ensemble is about as accurate.
    """
    without, within = (torch.tensor([of_tree(weight, seed) for seed in SEEDS]) for weight in (0.0, 1.0))
    assert bool((within[:, 0] > without[:, 0] + 0.02).all())  # disagreement
    assert bool((within[:, 2] < without[:, 2]).all())  # members alone
    gains = [(found[:, 1] - found[:, 2]).mean() for found in (without, within)]
    assert gains[1] > gains[0] + 0.02
    apart = within[:, 1] - without[:, 1]
    assert abs(float(apart.mean())) <= 4 * float(apart.std()) / math.sqrt(len(SEEDS)) + 0.02


# -- distillation ------------------------------------------------------------------------------------------------------


@cache
def teacher() -> Ensemble:
    """Return ten networks, trained as an ensemble."""
    exchange = {"type": "independent", "average": "probabilities"}
    found = train_laid_out(lambda: digits(hidden=[128]), settings(MEMBERS, exchange, steps=60, seed=100))
    ensemble = Ensemble([digits(hidden=[128]).build_model() for _ in range(MEMBERS)], "probabilities")
    ensemble.load_state_dict(found.weights)
    return ensemble


class FewDigits(Digits):
    """A task with sixty of the 1,438 images to learn from; it validates on the usual ones."""

    def dataset(self, split: str) -> pa.Table:
        table = super().dataset(split)
        return table.slice(0, 60) if split == "train" else table


def accuracy_of(task: Any, seed: int) -> float:
    chosen = settings(steps=100, seed=seed, batch_size=20)
    validation = train_laid_out(lambda: task, chosen).outcome.final["validation"]
    assert validation is not None
    return float(validation["accuracy"])


def test_a_student_of_a_large_ensemble_beats_the_same_network_on_hard_labels(
    record_property: pytest.RecordProperty,
) -> None:
    """Check Hinton et al. 2015, section 5: soft targets carry what few samples do not.

    The student, an eightieth of its teacher's size, stands between the network that learns from labels and the teacher.
    Over the seeds the difference is more than four standard errors from nothing.
    """
    small = FewDigits(hidden=[16])
    batch = small.to_batch(small.dataset("validation"))
    with torch.no_grad():
        taught = float(small.metrics(teacher()(batch["inputs"]), batch)["accuracy"])
    hard = torch.tensor([accuracy_of(small, seed) for seed in SEEDS])
    soft = torch.tensor(
        [accuracy_of(DistilledTask(small, teacher, temperature=4.0, weight=0.9), seed) for seed in SEEDS]
    )
    record_property("accuracies", {"hard": hard.tolist(), "student": soft.tolist(), "teacher": taught})
    gain = soft - hard
    assert float(gain.mean()) > 4 * float(gain.std()) / math.sqrt(len(SEEDS))
    assert float(hard.mean()) + 0.02 < float(soft.mean()) <= taught
    sizes = [sum(p.numel() for p in model.parameters()) for model in (teacher(), small.build_model())]
    assert sizes[0] > 78 * sizes[1]


# -- TreeNets as a scheme ----------------------------------------------------------------------------------------------


def test_treenets_send_the_trunks_gradient_alone_and_still_answer_better_than_a_member() -> None:
    exchange = {"type": "independent", "trunk": 2, "average": "probabilities"}
    found = train_laid_out(lambda: digits(hidden=[32, 32]), settings(3, exchange, steps=60))
    for name in ("0.weight", "0.bias"):
        members = [found.weights[f"members.{index}.{name}"] for index in range(3)]
        assert all(torch.equal(member, members[0]) for member in members)
    assert not torch.equal(found.weights["members.0.2.weight"], found.weights["members.1.2.weight"])
    validation: Any = found.outcome.final["validation"]
    assert validation["loss"] < sum(member["loss"] for member in validation["members"]) / 3
