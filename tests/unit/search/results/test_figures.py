"""The data of the figures, against small searches whose pictures are known."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from orchestray.search.results.figures import (
    Goal,
    best_line,
    best_so_far,
    front_of,
    learning_curves,
    lineage_graph,
    parallel_coordinates,
    pareto,
    schedule,
    trial_table,
)
from orchestray.search.results.importance import importance

UP, DOWN = Goal("accuracy", "max"), Goal("loss", "min")


def line(trial: int, objective: float | None, status: str = "succeeded", **more: Any) -> dict[str, Any]:
    return {"trial": trial, "status": status, "objective": objective, "config": {}, "steps": 1, "seconds": 1.0, **more}


def test_the_best_follows_the_mode_and_leaves_out_what_failed() -> None:
    lines = [line(0, 0.5), line(1, 0.9, "failed"), line(2, 0.2), line(3, None, "failed"), line(4, 0.7, "stopped")]
    best, worst = best_line(lines, UP), best_line(lines, DOWN)
    assert best is not None
    assert worst is not None
    assert (best["trial"], worst["trial"]) == (4, 2)
    assert best_line([line(0, None, "failed")], UP) is None


def test_of_equals_the_earliest_trial_is_the_best_though_another_ended_first() -> None:
    for goal in (UP, DOWN):
        best = best_line([line(4, 0.7), line(2, 0.7), line(3, 0.7)], goal)
        assert best is not None
        assert best["trial"] == 2


def test_the_best_so_far_never_gets_worse_and_stands_at_the_trials_that_ended() -> None:
    lines = [line(3, 0.5), line(0, None, "failed"), line(1, 0.4), line(2, 0.8)]
    assert best_so_far(lines, UP) == {
        "x": [1, 3, 4],
        "trials": [3, 1, 2],
        "objectives": [0.5, 0.4, 0.8],
        "best": [0.5, 0.5, 0.8],
    }
    assert best_so_far(lines, DOWN)["best"] == [0.5, 0.4, 0.4]


def test_curves_are_sorted_by_their_best_and_a_step_counts_as_it_was_reported_last() -> None:
    reports = [
        {"trial": 1, "step": 10, "metrics": {"accuracy": 0.9}},
        {"trial": 0, "step": 20, "metrics": {"accuracy": 0.3}},
        {"trial": 0, "step": 10, "metrics": {"accuracy": 0.1}},
        {"trial": 0, "step": 10, "metrics": {"accuracy": 0.2}},
        {"trial": 2, "step": 10, "metrics": {"loss": 1.0}},
    ]
    assert learning_curves(reports, [line(1, 0.9)], UP) == {
        "metric": "accuracy",
        "curves": [
            {"trial": 0, "status": "running", "x": [10, 20], "y": [0.2, 0.3]},
            {"trial": 1, "status": "succeeded", "x": [10], "y": [0.9]},
        ],
        "num_left_out": 0,
    }


def test_the_table_has_a_column_for_every_key_and_only_for_what_some_trial_has() -> None:
    lines = [line(0, 0.5, config={"a": 1}), line(1, None, "failed", config={"b": [1, 2]}, error="broke")]
    assert trial_table(lines) == {
        "columns": ["trial", "status", "objective", "a", "b", "steps", "seconds", "error"],
        "rows": [[0, "succeeded", 0.5, 1, None, 1, 1.0, None], [1, "failed", None, None, "[1,2]", 1, 1.0, "broke"]],
    }


def test_axes_are_in_the_logarithm_where_the_key_is_and_leave_out_what_never_differs() -> None:
    lines = [
        line(0, 0.5, config={"lr": 0.01, "kind": "a", "same": 1}),
        line(1, 0.6, config={"lr": 1.0, "kind": "b", "same": 1}, genome={"layers": 2}),
    ]
    lr, kind, objective = parallel_coordinates(lines, DOWN, ["lr"])["axes"]
    assert lr == {"label": "lr", "values": [-2.0, 0.0], "ticks": [[-2, "0.01"], [-1, "0.1"], [0, "1"]]}
    assert kind == {"label": "kind", "values": [0, 1], "ticks": [[0, "a"], [1, "b"]]}
    assert objective == {"label": "loss", "values": [0.5, 0.6], "ticks": None}
    assert parallel_coordinates(lines, DOWN)["scores"] == [-0.5, -0.6]


def test_a_genome_has_an_axis_for_each_choice_that_nearly_all_make_and_one_for_its_size() -> None:
    lines = [
        line(trial, 0.1, genome={"layers": trial % 2, **({"rare": 1} if trial else {})}, parameters=100 * (trial + 1))
        for trial in range(2)
    ]
    axes = parallel_coordinates(lines, UP)["axes"]
    assert [axis["label"] for axis in axes] == ["genome.layers", "parameters", "accuracy"]
    assert axes[1]["ticks"] == [[2.0, "100"], [np.log10(200), "200"]]


def test_trials_without_a_key_have_a_place_of_their_own_on_an_axis_of_numbers() -> None:
    kinds = [{"type": "a", "momentum": 0.5}, {"type": "b"}, {"type": "a", "momentum": 0.9}]
    lines = [line(trial, 0.1, config=config) for trial, config in enumerate(kinds)]
    momentum = parallel_coordinates(lines, UP)["axes"][1]
    assert momentum["values"] == pytest.approx([0.5, 0.44, 0.9])
    assert momentum["ticks"] == [[pytest.approx(0.44), "-"], [0.5, "0.5"], [0.9, "0.9"]]


def test_a_key_that_some_trials_lack_is_important_as_far_as_it_matters_to_the_others() -> None:
    lines = [line(trial, float(trial % 5), config={"kind": "a", "x": 10.0 * (trial % 5)}) for trial in range(20)]
    lines += [line(20 + trial, 2.0, config={"kind": "b"}) for trial in range(5)]
    assert importance(lines, UP)[0]["key"] == "x"


@pytest.mark.parametrize("pair", [(None, 0.1), (1, True), (None, "a"), (None, False)])
def test_a_choice_with_null_or_with_1_and_true_is_as_important_as_any_other(pair: tuple[Any, Any]) -> None:
    lines = [line(trial, float(trial % 2), config={"clip": pair[trial % 2], "x": trial // 2}) for trial in range(20)]
    found = importance(lines, UP)
    assert found[0]["key"] == "clip"
    assert found[0]["importance"] > 0.8


def test_the_lineage_of_an_evolution_lies_by_generations() -> None:
    nodes = [
        {"trial": 2, "parent": 1, "step": 0, "change": "grows"},
        {"trial": 0, "parent": None, "step": 0, "change": ""},
        {"trial": 1, "parent": 0, "step": 0, "change": "shrinks"},
    ]
    graph = lineage_graph(nodes, [line(1, 0.5)])
    assert graph["axis"] == "generation"
    assert [(node["trial"], node["x"], node["objective"]) for node in graph["nodes"]] == [
        (0, 0, None),
        (1, 1, 0.5),
        (2, 2, None),
    ]
    assert graph["edges"] == [[0, 1], [1, 2]]
    assert lineage_graph(nodes[1:2], [])["nodes"] == []


def test_the_lineage_of_a_population_lies_by_steps_and_joins_what_a_trial_was_with_what_it_became() -> None:
    nodes = [{"trial": trial, "parent": None, "step": 0, "change": ""} for trial in (0, 1)]
    nodes.append({"trial": 1, "parent": 0, "step": 50, "change": "lr x 1.2"})
    graph = lineage_graph(nodes, [])
    assert graph["axis"] == "step"
    assert graph["edges"] == [[1, 2], [0, 2]]
    assert (graph["nodes"][2]["x"], graph["nodes"][2]["y"]) == (50, 1)


def test_the_schedule_shows_the_numbers_that_change() -> None:
    nodes = [
        {"trial": 0, "parent": None, "step": 0, "change": "", "config": {"lr": 0.1, "size": 32}},
        {"trial": 0, "parent": 1, "step": 50, "change": "", "config": {"lr": 0.12, "size": 32}},
    ]
    reports = [
        {"trial": 0, "step": 50, "metrics": {}, "config": {"lr": 0.1, "size": 32}},  # of the steps before the change
        {"trial": 1, "step": 50, "metrics": {}, "config": {"lr": 0.2, "size": 32, "kind": "a"}},
    ]
    assert schedule(nodes, reports) == {
        "keys": {"lr": [{"trial": 0, "x": [0, 50], "y": [0.1, 0.12]}, {"trial": 1, "x": [50], "y": [0.2]}]}
    }


def test_the_front_holds_what_nothing_is_better_than_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((60, 2)).round(1)  # rounded, so that there are equal ones
    lines = [
        line(trial, float(a), objectives={"accuracy": float(a), "loss": float(b)})
        for trial, (a, b) in enumerate(points)
    ]
    front = {entry["trial"] for entry in front_of(lines, [UP, DOWN])}
    for trial, (a, b) in enumerate(points):
        is_beaten = any(c >= a and d <= b and (c > a or d < b) for c, d in points)
        assert (trial in front) == (not is_beaten)
    shown = pareto(lines, [UP, DOWN])
    assert {point["trial"] for point in shown["points"] if point["is_front"]} == front
    assert front_of([], [UP, DOWN]) == []


def test_the_key_that_decides_is_the_most_important_one() -> None:
    rng = np.random.default_rng(0)
    lines = []
    for trial in range(40):
        lr, size, kind = float(10 ** rng.uniform(-4, 0)), int(rng.choice([16, 32])), str(rng.choice(["a", "b"]))
        score = -((np.log10(lr) + 2) ** 2) + 0.1 * (kind == "a")
        lines.append(line(trial, float(score), config={"lr": lr, "size": size, "kind": kind, "same": 1}))
    found = importance(lines, UP, ["lr"])
    assert {entry["key"] for entry in found} == {"lr", "size", "kind"}
    assert found[0]["key"] == "lr"
    assert found[0]["importance"] > 0.8
    assert abs(sum(entry["importance"] for entry in found) - 1.0) < 1e-9
    large = {"lr": 0.01, "size": 64, "kind": "a", "same": 1}  # over a bound, so that its score says nothing of its size
    untrained = [line(trial, -9.0, config=large, steps=0, feasible=False) for trial in range(40, 60)]
    assert importance([*lines, *untrained], UP, ["lr"]) == found
    assert importance(lines[:7], UP) == []
    assert importance([line(trial, 1.0, config={"lr": trial}) for trial in range(20)], UP) == []


def test_numbers_as_large_as_floats_are_leave_a_share_to_each_key() -> None:
    largest = sys.float_info.max  # as some report for a failure
    lines = [
        line(trial, -largest if trial < 3 else 0.1 * trial, config={"x": [1.0, 1e300][trial % 2]}) for trial in range(9)
    ]
    assert [entry["importance"] for entry in importance(lines, UP)] == [1.0]
