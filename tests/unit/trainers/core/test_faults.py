"""Things that go wrong on purpose: decided purely, done in one place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.faults import RESENT_AFTER_S, FaultPlan, Faults, without_overlap
from support.layouts import layout_settings, train_laid_out
from support.training import digits, furthest


def fault(kind: str, rank: int = 1, role: str = "worker", **keys: Any) -> dict[str, Any]:
    defaults = {"at_step": 1, "factor": 10.0, "attack": "sign_flip", "scale": 100.0}
    return {"kind": kind, "role": role, "rank": rank, **defaults, **keys}


def test_a_process_is_killed_once_and_only_in_its_step() -> None:
    faults = [fault("kill", 1, at_step=5), fault("kill", 0, at_step=5), fault("kill", 1, at_step=9), fault("slow", 1)]

    def killed(rank: int, attempt: int, role: str = "worker") -> list[int]:
        plan = FaultPlan.of(faults, role, rank, attempt=attempt)
        return [step for step in range(1, 12) if plan.kills(step)]

    assert [killed(1, attempt) for attempt in range(4)] == [[5], [9], [], []]
    assert [killed(0, attempt) for attempt in range(3)] == [[5], [], []]
    assert killed(2, 0) == killed(1, 0, role="server") == []


def test_a_process_that_is_replaced_by_itself_counts_its_own_deaths() -> None:
    faults = [fault("kill", 0, at_step=3), fault("kill", 1, at_step=7)]
    assert FaultPlan.of(faults, "worker", 1, is_alone=True).kills(7)
    assert not FaultPlan.of(faults, "worker", 1).kills(7)
    assert FaultPlan.of(faults, "worker", 1, attempt=1).kills(7)


def test_of_several_faults_of_a_kind_the_one_that_began_last_holds() -> None:
    plan = FaultPlan.of([fault("slow", at_step=3, factor=4.0), fault("slow", at_step=6, factor=2.0)], "worker", 1)
    assert [plan.slow_factor(step) for step in (1, 2, 3, 5, 6, 60)] == [1, 1, 4, 4, 2, 2]
    delayed = FaultPlan.of([fault("delay", at_step=2, factor=0.5)], "worker", 1)
    assert [delayed.delay_s(step) for step in (1, 2, 3)] == [0.0, 0.5, 0.5]


def test_messages_are_dropped_at_the_given_rate_and_the_same_ones_each_time() -> None:
    plans = [FaultPlan.of([fault("drop", factor=0.3, at_step=2)], "worker", 1, seed=seed) for seed in (0, 0, 1)]
    drops = [[plan.drops(step, attempt) for step in range(2, 102) for attempt in range(20)] for plan in plans]
    assert drops[0] == drops[1] != drops[2]
    rate, sigma = sum(drops[0]) / 2000, (0.3 * 0.7 / 2000) ** 0.5
    assert abs(rate - 0.3) < 4 * sigma
    assert not plans[0].drops(1, 0)


@pytest.mark.parametrize("attack", ["sign_flip", "gaussian", "same_value"])
def test_an_attacker_sends_what_its_attack_says(attack: str) -> None:
    plan = FaultPlan.of([fault("byzantine", attack=attack, scale=3.0, at_step=2)], "worker", 1)
    before = [torch.linspace(-1, 1, 5000), torch.ones(3, 4)]
    sent = [[tensor.clone() for tensor in before] for _ in range(3)]
    for gradients, step in zip(sent, (1, 2, 2), strict=True):
        plan.attack(gradients, step)
    assert all(torch.equal(a, b) for a, b in zip(sent[0], before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(sent[1], sent[2], strict=True))
    if attack == "sign_flip":
        assert torch.equal(sent[1][0], -3 * before[0])
    elif attack == "same_value":
        assert set(torch.cat([t.flatten() for t in sent[1]]).tolist()) == {3.0}
    else:
        assert abs(float(sent[1][0].mean())) < 4 * 3 / 5000**0.5
        assert abs(float(sent[1][0].std()) - 3) < 4 * 3 / (2 * 5000) ** 0.5


def test_what_the_plan_says_is_done_around_the_computing() -> None:
    done: list[Any] = []
    clock = iter([10.0, 12.0])
    faults = [fault("kill", at_step=4), fault("slow", factor=5.0), fault("delay", factor=0.25), fault("byzantine")]
    doing = Faults(
        FaultPlan.of(faults, "worker", 1),
        kill=lambda: done.append("killed"),
        sleep=done.append,
        clock=lambda: next(clock),
    )
    model = nn.Linear(2, 1)
    with doing.during(4, model):
        assert done == ["killed"]
        model.weight.grad = torch.ones_like(model.weight)
    assert done == ["killed", 2.0 * 4 + 0.25]
    assert model.weight.grad.tolist() == [[-100.0, -100.0]]
    with Faults().during(4, model):
        pass
    assert done == ["killed", 8.25]


@pytest.mark.parametrize("exchange", [{}, {"factors": "always"}, {"algorithm": "ring"}])
def test_a_byzantine_workers_gradient_is_what_it_says_whatever_sends_it(exchange: dict[str, Any]) -> None:
    train = {"steps": 1, "optimizer": {"type": "sgd", "lr": 1.0}}

    def task() -> Any:
        return digits(hidden=[8])

    def weights(data: int, *faults: dict[str, Any]) -> Any:
        settings = layout_settings({"data": data}, exchange if data > 1 else None, **train)
        return train_laid_out(task, replace(settings, faults=faults)).weights

    first, second = fault("byzantine", 0, scale=1.0), fault("byzantine", 1, scale=1.0)
    plain, both, flipped, other = weights(1), weights(2, first, second), weights(2, first), weights(2, second)
    # From the same start: -(g0 + g1), g0 + g1, g0 - g1 and g1 - g0.
    start = {name: (plain[name] + both[name]) / 2 for name in plain}
    assert furthest({name: (flipped[name] + other[name]) / 2 for name in plain}, start) <= 1e-12
    assert furthest(flipped, start) > 1e-3
    assert furthest(flipped, other) > 1e-3


def test_a_byzantine_workers_gradients_are_not_sent_before_they_are_spoiled() -> None:
    byzantine = [fault("byzantine")]
    assert without_overlap({"type": "allreduce", "overlap": True}, byzantine)["overlap"] is False
    assert without_overlap({"type": "allreduce", "overlap": True}, [fault("slow")])["overlap"] is True
    assert without_overlap({"type": "gossip"}, byzantine) == {"type": "gossip"}
    with pytest.raises(ConfigError, match="use shard: none"):
        without_overlap({"type": "allreduce", "shard": "gradients"}, byzantine)


def test_a_lost_message_is_late_by_the_time_until_it_is_sent_again() -> None:
    drop = {"kind": "drop", "role": "worker", "rank": 0, "at_step": 3, "factor": 0.5}
    plan = FaultPlan.of([drop], "worker", 0, seed=7)
    slept: list[float] = []
    doing = Faults(plan, sleep=slept.append, clock=lambda: 0.0)
    lost = [plan.num_lost(step) for step in range(1, 200)]
    for step in range(1, 200):
        with doing.during(step, nn.Linear(1, 1)):
            pass
    assert lost[:2] == [0, 0]
    assert slept == [number * RESENT_AFTER_S for number in lost if number]
    assert 0.7 < sum(lost) / 197 < 1.3  # on average 1 at a probability of 1/2
