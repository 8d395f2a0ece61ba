"""Grid: each point exactly once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.hyper.grid import Grid
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.base import Genome, Graph
from orchestray.search.spaces.architectures.choices import ChoiceSpace, Choose
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Integer, Uniform
from orchestray.search.spaces.registry import make_space
from support.replayed import replay

SPACE: dict[str, Dimension] = {
    "a": Choice(("x", "y", "z")),
    "b": Binary(),
    "c": Integer(1, 4),
    "lr": Uniform(1e-3, 1.0, is_log=True),
}
POINTS = {"lr": 4}


class Switches(ChoiceSpace):
    """Three on/off layers, of which networks are the same that have as many on."""

    def compose(self, choose: Choose) -> None:
        for name in "pqr":
            choose(name, [False, True])

    def key(self, genome: object) -> str:
        assert isinstance(genome, dict)
        return str(sum(genome.values()))

    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        raise AssertionError("nothing is built here")

    def graph(self, genome: Genome) -> Graph:
        raise AssertionError("nothing is drawn here")


def points(grid: Grid) -> list[tuple[object, ...]]:
    found = []
    while (proposal := grid.ask()) is not None:
        found.append(tuple(proposal.changes.values()))
    return found


def test_each_point_of_the_product_is_proposed_exactly_once() -> None:
    grid = Grid(space=SPACE, points=POINTS)
    found = points(grid)
    assert len(found) == 3 * 2 * 4 * 4
    assert set(Counter(found).values()) == {1}
    assert grid.is_done


def test_real_numbers_are_taken_evenly_with_both_ends() -> None:
    found = {point[0] for point in points(Grid(space={"lr": SPACE["lr"]}, points=POINTS))}
    assert [math.log10(number) for number in sorted(map(float, map(str, found)))] == pytest.approx([-3, -2, -1, 0])


def test_after_a_killed_search_the_rest_of_the_points_follow_and_none_twice() -> None:
    whole = simulate(Grid(space=SPACE, points=POINTS), lambda _proposal, _step: 0.0, workers=3)
    for cut in (0, 7, 100, len(whole.calls) - 1):
        resumed = Grid(space=SPACE, points=POINTS)
        replay(resumed, whole.calls[:cut])
        before = [tuple(call.answer.changes.values()) for call in whole.calls[:cut] if call.name == "ask"]
        every = Counter([*before, *points(resumed)])
        assert len(every) == 96
        assert set(every.values()) == {1}


def test_points_of_integers_are_whole_and_no_more_than_there_are() -> None:
    assert points(Grid(space={"n": Integer(1, 3)}, points={"n": 10})) == [(1,), (2,), (3,)]
    assert points(Grid(space={"n": Integer(1, 100)}, points={"n": 3})) == [(1,), (51,), (100,)]
    assert points(Grid(space={"n": Integer(1, 9, is_log=True)})) == [(number,) for number in range(1, 10)]


def test_a_range_of_more_values_than_fit_in_memory_is_walked_from_its_start() -> None:
    space: dict[str, Dimension] = {"seed": Integer(0, 2**62), "b": Binary()}
    assert points(Grid(space=space, trials=3)) == [(0, False), (0, True), (1, False)]
    assert len(points(Grid(space=space, points={"seed": 3}))) == 6


def test_trials_cut_the_grid_off() -> None:
    assert len(points(Grid(space=SPACE, points=POINTS, trials=5))) == 5


def test_networks_are_enumerated_each_once() -> None:
    grid = Grid(space={"b": Binary()}, architecture=Switches())
    proposals = simulate(grid, lambda _proposal, _step: 0.0).trials.values()
    found = [(sum(trial.proposal.genome.values()), trial.proposal.changes["b"]) for trial in proposals]
    assert sorted(found) == [(count, flag) for count in range(4) for flag in (False, True)]


def test_a_range_without_a_count_is_refused_with_what_to_say() -> None:
    with pytest.raises(ConfigError, match=r"search\.method\.points: \{lr: N\}"):
        Grid(space=SPACE)
    with pytest.raises(ConfigError, match=r"no key of search\.space"):
        Grid(space=SPACE, points={"lr": 3, "momentum": 2})


def test_a_space_whose_genomes_are_mostly_one_network_is_refused_in_place_of_walked_for_ever() -> None:
    with pytest.raises(ConfigError, match="genomes in a row are networks"):
        simulate(Grid(space={}, architecture=make_space("hierarchical"), trials=3), lambda _proposal, _step: 0.0)
