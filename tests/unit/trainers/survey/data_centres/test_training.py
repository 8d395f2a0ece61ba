"""Approximate Synchronous Parallel (Gaia, Hsieh et al. 2017) in virtual time, beside full synchronisation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from orchestray.trainers.survey.data_centres.centre import FULL_SYNCHRONISATION, DataCentre, Rules
from orchestray.trainers.survey.data_centres.comparison import LARGE_RATE, LINKS, SIGNIFICANCE, gaia
from orchestray.trainers.survey.data_centres.outbox import Barrier, Message, Update
from orchestray.trainers.survey.data_centres.training import Setting, SparseRegression, Trained, Training, Witness

SLOW, FAST = Setting(LINKS["slow"]), Setting(LINKS["fast"])
ASP = gaia(SLOW)
SEEDS = range(2)


class Watch(Witness):
    """A witness that trusts no server: it notes itself what has been announced and has not arrived."""

    def __init__(self) -> None:
        self.early_reads = 0
        """Reads with a parameter whose significant change had been announced and had not arrived."""
        self.reads_beside = 0
        """Reads while others had been announced and had not arrived."""
        self.most_kept = 0.0
        """Largest part of the falling threshold that an insignificant change had."""
        self._announced: dict[tuple[int, int], set[int]] = defaultdict(set)

    def reads(self, reader: DataCentre, places: Tensor) -> None:
        held = set().union(*(held for (receiver, _), held in self._announced.items() if receiver == reader.number))
        self.early_reads += not held.isdisjoint(places.tolist())
        self.reads_beside += bool(held) and held.isdisjoint(places.tolist())

    def updated(self, centre: DataCentre) -> None:
        limit = centre.values.abs().clamp(min=1e-3) * (SIGNIFICANCE / max(1, centre.clock) ** 0.5)
        self.most_kept = max(self.most_kept, float((centre.residual.pending.abs() / limit).max()))

    def arrived(self, receiver: DataCentre, sender: int, message: Message) -> None:
        held = self._announced[receiver.number, sender]
        if isinstance(message, Barrier):
            held.update(message.places.tolist())
        elif isinstance(message, Update):
            held.difference_update(message.places.tolist())


@cache
def run(rules: Rules, setting: Setting = SLOW, seed: int = 0) -> tuple[Trained, Watch]:
    watch = Watch()
    return Training(rules, setting, seed, witness=watch).run(), watch


@pytest.mark.parametrize("seed", SEEDS)
def test_what_stays_never_exceeds_a_threshold_that_falls_with_the_root_of_the_clock(seed: int) -> None:
    found, watch = run(ASP, seed=seed)
    assert 0.5 < watch.most_kept < 1
    assert run(replace(ASP, falls=False), seed=seed)[1].most_kept > 1
    assert found.num_bytes < 0.5 * run(FULL_SYNCHRONISATION, seed=seed)[0].num_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_reads_what_is_announced_and_has_not_arrived_and_readers_of_others_go_on(seed: int) -> None:
    found, watch = run(ASP, seed=seed)
    assert watch.early_reads == 0
    assert watch.reads_beside > 0
    assert found.waited_s["barrier"] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_no_data_centre_is_ever_further_ahead_than_the_bound(seed: int) -> None:
    assert ASP.most_ahead == 4
    for bound in (1, 2, 4):
        assert run(replace(ASP, most_ahead=bound), seed=seed)[0].most_ahead == bound
    assert run(Rules(SIGNIFICANCE, announces=False), seed=seed)[0].most_ahead > 10  # one data centre is slower


@pytest.mark.parametrize("seed", SEEDS)
def test_over_a_slow_link_the_target_is_reached_in_less_than_half_the_time_of_full_synchronisation(seed: int) -> None:
    full, found = run(FULL_SYNCHRONISATION, seed=seed)[0].seconds, run(ASP, seed=seed)[0].seconds
    assert full is not None
    assert found is not None
    assert found < 0.5 * full
    # Over a fast link little is lost.
    full, found = run(FULL_SYNCHRONISATION, FAST, seed)[0].seconds, run(gaia(FAST), FAST, seed)[0].seconds
    assert full is not None
    assert found is not None
    assert found < 1.2 * full


def test_where_old_parameters_do_harm_asp_reaches_the_target_and_its_filter_alone_does_not() -> None:
    setting = replace(SLOW, lr=LARGE_RATE, most_clocks=300)
    assert run(ASP, setting)[0].seconds is not None
    assert run(Rules(SIGNIFICANCE, announces=False), setting)[0].seconds is None


def test_full_synchronisation_lets_nobody_read_before_everything_has_arrived() -> None:
    full, watch = run(FULL_SYNCHRONISATION)
    assert watch.early_reads == watch.reads_beside == 0
    assert full.most_ahead == 1


def test_the_problem_has_few_weights_a_sample_and_its_gradient_is_that_of_its_loss() -> None:
    problem = SparseRegression(0, 2, num_samples=12, num_weights=30, num_features=3)
    weights = torch.randn(30, dtype=torch.float64, requires_grad=True)
    rows = torch.arange(12)
    wanted = torch.zeros(30, dtype=torch.float64)
    for centre in range(2):
        places = problem.places(centre, rows[:4])
        assert 3 <= len(places) <= 12
        places = problem.places(centre, rows)
        wanted[places] += problem.gradient(centre, rows, places, weights.detach()[places]) / 2
    loss = (problem.inputs @ weights - problem.targets).square().mean() / 2
    (found,) = torch.autograd.grad(loss, weights)
    assert torch.allclose(found, wanted)
    assert problem.loss(weights.detach()) == pytest.approx(float(loss.detach()))
