"""Rumours: what push gossip reaches, and that a correction reaches the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest

from orchestray.trainers.survey.dissemination import corrected_gossip, push_gossip
from orchestray.trainers.sync.local.mixing import expected_rounds


def test_a_rumour_is_told_to_at_most_as_many_as_know_it() -> None:
    for rounds in range(1, 6):
        spread = push_gossip(64, rounds, 200, np.random.default_rng(rounds))
        known = spread.informed.sum(axis=1)
        assert known.max() <= 2**rounds
        assert known.min() >= 2  # the first round always reaches another one
        assert (spread.rounds_to_all == -1).all()


def test_who_is_told_first_is_anybody_but_the_teller() -> None:
    trials, nodes = 8000, 5
    informed = push_gossip(nodes, 1, trials, np.random.default_rng(0)).informed
    assert informed[:, 0].all()
    others = informed[:, 1:].sum(axis=0)
    assert others.sum() == trials
    assert np.abs(others - trials / 4).max() <= 4 * (trials * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize("nodes", [8, 32, 128])
def test_rounds_to_reach_all_are_near_pittels_log2_m_plus_ln_m(nodes: int) -> None:
    spread = push_gossip(nodes, 12 * round(math.log2(nodes)), 400, np.random.default_rng(nodes))
    assert (spread.rounds_to_all > 0).all()
    excess = spread.rounds_to_all.mean() - (math.log2(nodes) + math.log(nodes))
    assert 0 <= excess <= 1.5


def test_correction_sends_to_each_side_until_it_meets_somebody_who_knew() -> None:
    # Without gossip node 0 alone knows: it must walk around the whole ring, both ways.
    alone = corrected_gossip(9, 0, 1, np.random.default_rng(0))
    assert alone.missed.tolist() == [0]
    assert alone.after_gossip.tolist() == [1]
    assert alone.correction_steps.tolist() == [8]
    assert alone.messages.tolist() == [16]


@pytest.mark.parametrize("nodes", [8, 64])
def test_gossip_that_reached_all_costs_one_step_of_correction(nodes: int) -> None:
    found = corrected_gossip(nodes, 200, 5, np.random.default_rng(0))
    assert found.after_gossip.tolist() == [nodes] * 5
    assert found.correction_steps.tolist() == [1] * 5


def test_checked_correction_misses_somebody_where_the_failure_proof_one_does_not() -> None:
    arguments = {"num_nodes": 64, "rounds": 4, "trials": 1000, "num_failures": 12}
    checked = corrected_gossip(draw=np.random.default_rng(1), **arguments)  # type: ignore[arg-type]
    proof = corrected_gossip(draw=np.random.default_rng(1), tolerated_failures=12, **arguments)  # type: ignore[arg-type]
    assert checked.missed.sum() > 0
    assert proof.missed.sum() == 0
    assert proof.messages.mean() > checked.messages.mean()


def test_the_surveys_number_of_rounds() -> None:
    assert expected_rounds(1024) == pytest.approx(16.39)
    assert expected_rounds(1) == 0
