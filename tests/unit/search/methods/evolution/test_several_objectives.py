"""Evolution by several objectives: fronts, crowding, and a population that spreads over the front."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from orchestray.search.methods.base import Finished, Method
from orchestray.search.methods.evolution.genetic_cnn import GeneticCnn
from orchestray.search.methods.evolution.hierarchical import HierarchicalEvolution
from orchestray.search.methods.evolution.large_scale import LargeScaleEvolution
from orchestray.search.methods.evolution.regularized import RegularizedEvolution
from orchestray.search.methods.evolution.selection import (
    standings,
    subset_tournament,
    tournament,
    worst_of,
)
from orchestray.search.methods.evolution.variation import Candidate, Individual
from orchestray.search.spaces.dimensions import Binary, Dimension, Uniform

SPACE: dict[str, Dimension] = {name: Uniform(-4.0, 4.0) for name in ("x", "y", "z")}
MAKERS: dict[str, Callable[[int], Method]] = {
    "regularized": lambda seed: RegularizedEvolution(space=SPACE, trials=150, population=30, seed=seed),
    "large_scale": lambda seed: LargeScaleEvolution(
        space=SPACE, trials=400, population=20, inherit_weights=False, seed=seed
    ),  # pairs press less than tournaments of five: it takes longer
    "hierarchical": lambda seed: HierarchicalEvolution(
        space=SPACE, trials=150, population=30, initial_mutations=0, tournament_fraction=0.15, seed=seed
    ),
}


def individuals(scores: np.ndarray) -> list[Individual]:
    return [Individual(trial, row[0], Candidate(), tuple(row)) for trial, row in enumerate(scores.tolist())]


def test_a_better_front_goes_before_more_room_and_more_room_decides_on_a_front() -> None:
    scores = np.array([[0.0, 4.0], [4.0, 0.0], [2.0, 2.0], [2.1, 1.9], [3.0, 1.5], [-9.0, 3.0], [3.5, -9.0]])
    standing = standings(individuals(scores))
    assert standing[:5].min() >= 0 > standing[5:].max()
    assert np.argsort(-standing[:5])[0] == 0, "two apart from its neighbour on either side"
    assert standing[4] > standing[3]


def test_tournaments_among_all_are_won_by_the_front_and_lost_by_the_dominated() -> None:
    scores = np.array([[0.0, 4.0], [4.0, 0.0], [2.0, 2.0], [1.0, 1.0], [0.5, 0.5], [9.0, -1.0]])
    group = individuals(scores)
    rng = np.random.default_rng(0)
    assert {subset_tournament(group, 6, rng).trial for _ in range(50)} == {5}, "the loneliest of the front"
    assert {subset_tournament(group[2:5], 3, rng).trial for _ in range(50)} == {2}
    assert {tournament(group, 60, rng).trial for _ in range(50)} == {5}
    assert {worst_of(group, 60, rng) for _ in range(50)} == {4}


def objectives(values: dict[str, float]) -> tuple[float, float]:
    """Return the nearness of a point to one corner of a cube, and to the other.

    The best of both are on the line between them.
    """
    at = np.array(list(values.values()))
    return -float(((at - 1) ** 2).sum()), -float(((at + 1) ** 2).sum())


def volume(points: np.ndarray, corner: float = -14.0) -> float:
    """Return the area that two scores dominate, above a corner."""
    best, area = corner, 0.0
    for first, second in points[np.argsort(-points[:, 0], kind="stable")]:
        if first > corner and second > best:
            area += (first - corner) * (second - best)
            best = second
    return area


def evolved(method: Method, *, by_both: bool) -> float:
    """Return the area that all trials of a search dominate."""
    found = []
    while (proposal := method.ask()) is not None:
        scores = objectives(dict(proposal.changes))
        found.append(scores)
        method.tell(Finished(proposal.trial, "succeeded", 1, scores[0], scores if by_both else scores[:1]))
    return volume(np.array(found))


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_by_two_objectives_more_of_the_front_is_found_than_by_the_first_alone(name: str) -> None:
    make = MAKERS[name]
    gains = [evolved(make(seed), by_both=True) - evolved(make(seed), by_both=False) for seed in range(9)]
    assert np.median(gains) > 0
    assert sum(gain > 0 for gain in gains) >= 7, gains


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_two_objectives_that_are_one_choose_the_parents_that_one_does(name: str) -> None:
    def followed(*, twice: bool) -> list[object]:
        method, made = MAKERS[name](3), []
        while (proposal := method.ask()) is not None:
            made.append((proposal.parent, dict(proposal.changes)))
            score = objectives(dict(proposal.changes))[0]
            method.tell(Finished(proposal.trial, "succeeded", 1, score, (score, 2 * score) if twice else (score,)))
        return made

    assert followed(twice=True) == followed(twice=False)


def genetic(seed: int) -> GeneticCnn:
    bits: dict[str, Dimension] = {f"bit{number:02d}": Binary() for number in range(16)}
    return GeneticCnn(space=bits, population=16, trials=160, seed=seed)


def test_fitness_in_a_generation_is_how_a_member_stands_there_and_what_failed_is_as_bad_as_the_worst() -> None:
    method = genetic(0)
    for number in range(15):
        proposal = method.ask()
        assert proposal is not None
        scores = (float(number % 5), float(-number))
        status = "failed" if number == 7 else "succeeded"
        method.tell(Finished(proposal.trial, status, 1, None if number == 7 else scores[0], scores))
    last = method.ask()
    assert last is not None
    method.tell(Finished(last.trial, "succeeded", 1, 9.0, (9.0, 9.0)))
    fitness, failed = np.array(method.fitness()), 7
    known = [method.scores[one.key] for one in method.members if method.scores[one.key] is not None]
    assert np.array_equal(np.delete(fitness, failed), standings(individuals(np.array(known))))
    assert fitness[failed] == fitness.min()
    assert fitness.argmax() == 15, "better than all others in both"


def test_generations_by_two_objectives_find_more_of_the_front_than_by_the_first_alone() -> None:
    def of(bits: dict[str, bool]) -> tuple[float, float]:
        values = [bits[name] for name in sorted(bits)]
        return float(sum(values[:10])), float(10 - sum(values[6:]))

    def found(seed: int, *, by_both: bool) -> float:
        method, points = genetic(seed), []
        while (proposal := method.ask()) is not None:
            scores = of(dict(proposal.changes))
            points.append(scores)
            method.tell(Finished(proposal.trial, "succeeded", 1, scores[0], scores if by_both else scores[:1]))
        return volume(np.array(points), corner=-1.0)

    gains = [found(seed, by_both=True) - found(seed, by_both=False) for seed in range(12)]
    assert np.mean(gains) > 0
    assert sum(gain >= 0 for gain in gains) >= 8, gains
