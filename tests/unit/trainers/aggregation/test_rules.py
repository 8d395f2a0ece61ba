"""Rules that withstand workers that send anything."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.trainers.aggregation.base import Krum, make_aggregation
from orchestray.trainers.aggregation.rules import (
    krum_scores,
    mean,
    median,
    multi_krum,
    trimmed_mean,
)

SIZES = [(n, f) for f in range(4) for n in range(2 * f + 3, 2 * f + 7)]


def krum(vectors: Tensor, byzantine: int) -> Tensor:
    return Krum(byzantine)(vectors)


def honest(num: int, seed: int, elements: int = 12) -> Tensor:
    """Return vectors near each other, far from zero."""
    generator = torch.Generator().manual_seed(seed)
    return 5 + 0.1 * torch.randn(num, elements, dtype=torch.float64, generator=generator)


def attacked(num_workers: int, byzantine: int, seed: int, attack: str) -> tuple[Tensor, list[int]]:
    """Return shuffled vectors, the last few of which were attackers', and the places of the honest ones."""
    good = honest(num_workers - byzantine, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    bad = {
        "sign_flip": -100 * good[:1].expand(byzantine, -1),
        "gaussian": 100 * torch.randn(byzantine, good.shape[1], dtype=torch.float64, generator=generator),
        "same_value": torch.full((byzantine, good.shape[1]), 100.0, dtype=torch.float64),
        "nan": torch.full((byzantine, good.shape[1]), math.nan, dtype=torch.float64),
        "infinite": torch.full((byzantine, good.shape[1]), math.inf, dtype=torch.float64),
        "huge": torch.full((byzantine, good.shape[1]), -1e300, dtype=torch.float64),
    }[attack]
    order = torch.randperm(num_workers, generator=generator)
    rows = torch.cat([good, bad])[order]
    return rows, [place for place, index in enumerate(order.tolist()) if index < num_workers - byzantine]


ATTACKS = ["sign_flip", "gaussian", "same_value", "nan", "infinite", "huge"]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("num_workers", "byzantine"), SIZES)
def test_krum_picks_an_honest_vector_from_2f_plus_3_workers_on(num_workers: int, byzantine: int, attack: str) -> None:
    for seed in range(5):
        vectors, good = attacked(num_workers, byzantine, seed, attack)
        rule = Krum(byzantine)
        chosen = rule(vectors)
        (place,) = [place for place, count in enumerate(rule.run_report()["picked"]) if count]
        assert torch.equal(chosen, vectors[place])
        assert any(torch.equal(chosen, vectors[index]) for index in good)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("num_workers", "byzantine"), [(n, f) for n, f in SIZES if f])
def test_every_robust_rule_stays_among_the_honest_where_the_mean_is_taken_over(
    num_workers: int, byzantine: int, attack: str
) -> None:
    vectors, good = attacked(num_workers, byzantine, 7, attack)
    low, high = vectors[good].min(0).values, vectors[good].max(0).values
    for combined in (multi_krum(vectors, byzantine), median(vectors), trimmed_mean(vectors, byzantine)):
        assert bool(((low <= combined) & (combined <= high)).all())
    taken_over = mean(vectors)
    assert not bool(((low <= taken_over) & (taken_over <= high)).all())


def test_one_attacker_makes_any_weighted_mean_whatever_it_wants() -> None:
    good = honest(6, 0)
    weights = torch.tensor([0.05, 0.2, 0.1, 0.15, 0.2, 0.2, 0.1], dtype=torch.float64)
    wanted = torch.linspace(-3, 1e3, good.shape[1], dtype=torch.float64)
    crafted = (wanted - weights[:-1] @ good) / weights[-1]
    vectors = torch.cat([good, crafted[None]])
    assert float((mean(vectors, weights) - wanted).abs().max()) <= 1e-11
    assert float((krum(vectors, 1) - 5).abs().max()) < 1


def test_krums_score_is_the_sum_of_the_distances_to_the_n_minus_f_minus_2_nearest() -> None:
    vectors = torch.tensor([[0.0], [1.0], [3.0], [7.0], [100.0]], dtype=torch.float64)
    assert krum_scores(vectors, 1).tolist() == [1 + 9, 1 + 4, 4 + 9, 16 + 36, 93**2 + 97**2]
    assert krum(vectors, 1).tolist() == [1.0]
    assert multi_krum(vectors, 1, 3).tolist() == [4 / 3]
    assert multi_krum(vectors, 1).tolist() == [0.5]  # of n - f - 2 = 2


def test_multi_krum_of_one_is_krum_and_of_all_honest_ones_their_mean() -> None:
    vectors, good = attacked(9, 3, 3, "sign_flip")
    assert torch.equal(multi_krum(vectors, 3, 1), krum(vectors, 3))
    assert torch.equal(multi_krum(vectors, 3, 6), vectors[good].mean(0))
    with pytest.raises(ValueError, match="1 to n - f = 6"):
        multi_krum(vectors, 3, 7)


@pytest.mark.parametrize("num_workers", [1, 2, 5, 8])
def test_the_median_is_the_middle_and_the_trimmed_mean_without_a_trim_the_mean(num_workers: int) -> None:
    vectors = honest(num_workers, 11)
    assert torch.equal(median(vectors), vectors.quantile(0.5, 0, interpolation="midpoint"))
    assert float((trimmed_mean(vectors, 0) - vectors.mean(0)).abs().max()) <= 1e-14


def test_the_trimmed_mean_leaves_out_the_smallest_and_largest_of_each_coordinate() -> None:
    vectors = torch.tensor([[1.0, 9.0], [2.0, -50.0], [3.0, 5.0], [40.0, 7.0], [-9.0, 6.0]])
    assert trimmed_mean(vectors, 1).tolist() == [2.0, 6.0]
    assert trimmed_mean(vectors, 2).tolist() == median(vectors).tolist()


def test_the_weighted_mean_counts_samples() -> None:
    vectors = torch.tensor([[1.0], [4.0]], dtype=torch.float64)
    assert mean(vectors, torch.tensor([3.0, 1.0])).tolist() == [1.75]
    assert mean(vectors).tolist() == [2.5]


def test_the_bounds_say_how_many_liars_are_withstood() -> None:
    vectors = honest(4, 0)
    with pytest.raises(ValueError, match="from 5 workers on; got 4"):
        krum(vectors, 1)
    with pytest.raises(ValueError, match="from 5 workers on; got 4"):
        trimmed_mean(vectors, 2)


@pytest.mark.parametrize("kind", ["mean", "krum", "multi_krum", "median", "trimmed_mean"])
def test_a_rule_is_made_from_the_keys_of_its_config_section(kind: str) -> None:
    rule = make_aggregation(kind, **({} if kind == "mean" else {"byzantine": 1}))
    vectors, weights = honest(rule.min_workers, 2), torch.ones(rule.min_workers, dtype=torch.float64)
    assert rule(vectors, weights).shape == (12,)
    assert rule.is_coordinatewise == (kind in {"mean", "median", "trimmed_mean"})
    if rule.is_coordinatewise:
        parts = [rule(part, weights) for part in vectors.split(5, dim=1)]
        assert torch.allclose(torch.cat(parts), rule(vectors, weights), rtol=0, atol=1e-15)


def test_an_unknown_rule_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="median, trimmed_mean"):
        make_aggregation("average")
