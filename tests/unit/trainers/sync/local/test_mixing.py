"""Partners in gossip: matrices with the sums they promise, and draws that favour no replica."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.sync.local.mixing import (
    Mixer,
    contraction,
    random_matchings,
    random_targets,
    steps_to_reach_all,
)

PATH = {"edges": [(0, 1), (1, 2), (2, 3), (3, 4)]}
STAR = {"edges": [(0, 1), (0, 2), (0, 3), (0, 4)]}
GRAPHS: list[Any] = ["random", "ring", "complete", PATH, STAR]


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
@pytest.mark.parametrize("peers", [1, 2, 3])
def test_symmetric_mixing_is_symmetric_and_doubly_stochastic(graph: Any, peers: int) -> None:
    for size in [5] if isinstance(graph, dict) else range(2, 10):
        mixer = Mixer(size, graph, peers, seed=7)
        for step in range(1, 6):
            matrix = mixer.matrix(step)
            assert np.array_equal(matrix, matrix.T)
            assert matrix.min() >= 0
            assert np.diag(matrix).min() > 0
            np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-15)


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_push_sum_mixing_keeps_the_sum_whoever_hears_of_it(graph: Any) -> None:
    mixer = Mixer(5, graph, 2, "push_sum", seed=7)
    for step in range(1, 6):
        matrix = mixer.matrix(step)
        assert matrix.min() >= 0
        np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-15)


@pytest.mark.parametrize("size", [2, 4, 5, 8, 9])
def test_random_partners_are_as_many_as_asked_and_only_of_an_odd_number_one_rests(size: int) -> None:
    for peers in range(1, size):
        talks = random_matchings(size, peers, np.random.default_rng(peers))
        degrees = talks.sum(axis=1)
        assert np.array_equal(talks, talks.T)
        assert not talks.diagonal().any()
        assert set(degrees) <= ({peers} if size % 2 == 0 else {peers - 1, peers})
        assert (peers - degrees).sum() == (size % 2) * peers


@pytest.mark.parametrize("size", [2, 5, 8])
def test_random_one_way_targets_send_and_hear_of_as_many_as_asked(size: int) -> None:
    for peers in range(1, size):
        talks = random_targets(size, peers, np.random.default_rng(peers))
        assert not talks.diagonal().any()
        assert np.array_equal(talks.sum(axis=0), np.full(size, peers))
        assert np.array_equal(talks.sum(axis=1), np.full(size, peers))


@pytest.mark.parametrize("kind", ["symmetric", "push_sum"])
def test_every_pair_is_drawn_equally_often(kind: Any) -> None:
    size, steps = 6, 4000
    mixer = Mixer(size, "random", 1, kind, seed=3)
    counts = sum((mixer.matrix(step) > 0).astype(int) for step in range(1, steps + 1))
    chance = 1 / (size - 1)
    spread = 4 * (chance * (1 - chance) * steps) ** 0.5
    for first, second in combinations(range(size), 2):
        assert abs(counts[first, second] - chance * steps) <= spread
        assert abs(counts[second, first] - chance * steps) <= spread


def test_draws_depend_on_seed_and_step_alone() -> None:
    matrices = [Mixer(8, "random", 1, seed=seed).matrix(step) for seed in (0, 1) for step in (1, 2)]
    assert all(not np.array_equal(a, b) for a, b in combinations(matrices, 2))
    again = Mixer(8, "random", 1, seed=1)
    again.matrix(17)
    assert np.array_equal(again.matrix(2), matrices[3])


@pytest.mark.parametrize("graph", ["ring", "complete", PATH, STAR], ids=str)
def test_contraction_is_the_second_eigenvalue(graph: Any) -> None:
    matrix = Mixer(5, graph).matrix(1)
    second = np.sort(np.abs(np.linalg.eigvalsh(matrix)))[-2]
    assert contraction([matrix]) == pytest.approx(second, rel=0, abs=1e-14)


@pytest.mark.parametrize("size", [3, 6])
def test_contraction_of_random_pairs_bounds_what_is_left_of_any_disagreement(size: int) -> None:
    """Compare with the square of what is left on average over all steps' matrices, though each step leaves some out."""
    matrices = [Mixer(size, "random", 1, seed=step).matrix(step) for step in range(1, 65)]
    disagreement = np.random.default_rng(0).normal(size=(size, 200))
    disagreement -= disagreement.mean(axis=0)
    left = sum(np.square(matrix @ disagreement).sum(axis=0) for matrix in matrices) / len(matrices)
    rates = np.sqrt(left / np.square(disagreement).sum(axis=0))
    bound = contraction(matrices)
    assert rates.max() <= bound + 1e-12
    assert rates.max() > 0.9 * bound  # and no wider than it must be
    assert bound < 1.0


@pytest.mark.parametrize(
    ("size", "graph", "kind", "steps"),
    [
        (6, "ring", "symmetric", 3),
        (7, "ring", "symmetric", 3),
        (7, "ring", "push_sum", 6),
        (9, "complete", "symmetric", 1),
        (5, PATH, "symmetric", 4),
        (5, STAR, "push_sum", 2),
        (1, "random", "symmetric", 0),
    ],
)
def test_steps_until_all_have_heard_of_all_are_the_diameter(size: int, graph: Any, kind: Any, steps: int) -> None:
    assert steps_to_reach_all(Mixer(size, graph, kind=kind).matrix, size) == steps


def test_pairs_can_at_most_double_what_is_known() -> None:
    mixer = Mixer(16, "random", 1, seed=0)
    starts = [steps_to_reach_all(mixer.matrix, 16, first_step=step) for step in range(1, 40)]
    assert min(starts) >= 4
    assert max(starts) < 16


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ([(0, 1), (1, 3)], r"names replica 3, and there are 3"),
        ([(0, 1), (2, 2)], r"leads back to itself"),
        ([(0, 1)], r"no path leads from replica 1 to replica 2.*add an edge such as \[1, 2\]"),
        ([], r"not connected"),
    ],
)
def test_a_graph_that_cannot_agree_is_refused_with_what_would_fit(edges: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Mixer(3, {"edges": edges})
