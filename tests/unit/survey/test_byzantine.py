"""Workers that send anything: no linear rule withstands one, Krum does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from orchestray.trainers.aggregation.base import Krum
from orchestray.trainers.aggregation.rules import mean
from orchestray.trainers.core.outcome import Outcome
from support.layouts import layout_settings, train_laid_out
from support.training import digits

DATA = 5
TRAIN: dict[str, Any] = {
    "steps": 40,
    "batch_size": 50,
    "precision": "float32",
    "optimizer": {"type": "adam", "lr": 0.02},
    "validate_every_steps": 40,
}


def task() -> Any:
    return digits(hidden=[24])


def outcome(rule: str, attack: str | None, **train: Any) -> Outcome:
    faults: tuple[dict[str, Any], ...] = ()
    if attack is not None:
        scale = 0.1 if attack == "same_value" else 100.0
        fault = {"kind": "byzantine", "role": "worker", "rank": 3, "at_step": 1, "factor": 1.0}
        faults = ({**fault, "attack": attack, "scale": scale},)
    aggregation = {"type": "mean"} if rule == "mean" else {"type": rule, "byzantine": 1}
    settings = layout_settings({"data": DATA, "microbatches": 1}, **{**TRAIN, **train})
    return train_laid_out(task, replace(settings, aggregation=aggregation, faults=faults)).outcome


def accuracy(rule: str, attack: str | None, **train: Any) -> float:
    validation = outcome(rule, attack, **train).final["validation"]
    assert validation is not None
    return float(validation["accuracy"])


def test_one_byzantine_worker_makes_any_linear_rule_give_any_vector() -> None:
    """Check Blanchard et al. 2017, lemma 3.1: with weights that are not zero the attacker solves for what it sends."""
    generator = torch.Generator().manual_seed(0)
    for num_workers in range(2, 9):
        others = torch.randn(num_workers - 1, 7, dtype=torch.float64, generator=generator)
        weights = torch.rand(num_workers, dtype=torch.float64, generator=generator) + 0.1
        wanted = 1e3 * torch.randn(7, dtype=torch.float64, generator=generator)
        crafted = (weights.sum() * wanted - weights[:-1] @ others) / weights[-1]
        vectors = torch.cat([others, crafted[None]])
        assert float((mean(vectors, weights) - wanted).abs().max()) <= 1e-9
        if num_workers >= 5:  # one liar is withstood from 2 + 3 workers on
            assert float((Krum(1)(vectors) - wanted).abs().max()) > 1


@pytest.fixture(scope="module")
def clean() -> float:
    """Return the accuracy of the mean without an attack."""
    return accuracy("mean", None)


@pytest.mark.parametrize(("rule", "attack"), [("krum", "sign_flip"), ("krum", "gaussian"), ("multi_krum", "gaussian")])
def test_krum_recovers_the_accuracy_that_the_mean_loses(clean: float, rule: str, attack: str) -> None:
    assert clean > 0.85
    assert accuracy(rule, attack) > clean - 0.1


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_median_and_trimmed_mean_withstand_the_opposite_gradient(clean: float, rule: str) -> None:
    assert accuracy(rule, "sign_flip") > clean - 0.1


@pytest.mark.parametrize("attack", ["sign_flip", "gaussian"])
def test_the_mean_is_taken_over_by_one_worker(attack: str) -> None:
    assert accuracy("mean", attack, steps=12, validate_every_steps=12) < 0.3
