"""Data of runs and searches that pages are sent: all of it once, then what is new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestray.dashboard.listing import Library, Overview
from orchestray.dashboard.networks import ancestors
from orchestray.dashboard.run_view import RunView
from orchestray.dashboard.search_view import SearchView
from orchestray.search.results.schema import TrialLine
from orchestray.search.spaces.registry import make_space
from support.run_directories import (
    WrittenRun,
    damaged_run,
    evolution_search,
    population_search,
    random_search,
)


def run_view(path: Path) -> RunView:
    entry = Library(path.parent).find(path.name, "run")
    assert entry is not None
    return RunView(entry)


def search_view(path: Path) -> SearchView:
    entry = Library(path.parent).find(path.name, "search")
    assert entry is not None
    return SearchView(entry)


def test_the_overview_tells_each_run_and_search_and_then_only_what_changed(tmp_path: Path) -> None:
    overview = Overview(Library(tmp_path))
    assert overview.snapshot()["rows"] == []
    run, search = WrittenRun(tmp_path, "a-run"), random_search(tmp_path, trials=6)
    rows = {row["name"]: row for row in overview.snapshot()["rows"]}
    assert rows["a-run"]["status"] == rows["digits-random"]["status"] == "running"
    assert (rows["digits-random"]["done"], rows["digits-random"]["total"]) == (6, 10)
    assert overview.refresh() is None
    run.steps(30)
    change = overview.refresh()
    assert change is not None
    assert [(row["name"], row["done"], row["total"]) for row in change["changed"]] == [("a-run", 30, 460)]
    run.finish()
    search.close()
    change = overview.refresh()
    assert change is not None
    assert {row["name"]: row["status"] for row in change["changed"]} == {"a-run": "succeeded", "digits-random": "died"}


def test_a_run_tells_its_new_points_and_events_only(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, "run")
    run.steps(50)
    view = run_view(run.path)
    whole = view.snapshot()
    assert whole["points"]["train"]["loss"]["x"] == list(range(1, 51))
    assert whole["points"]["validation"]["accuracy"]["x"] == [23, 46]
    assert whole["head"]["status"] == "running"
    assert [row["is_live"] for row in whole["workers"]] == [True, True, True]
    assert view.refresh() is None
    run.steps(3)
    run.event("worker_lost", role="worker", rank=1)
    news = view.refresh()
    assert news is not None
    assert news["points"]["train"]["loss"]["x"] == [51, 52, 53]
    assert "validation" not in news["points"]
    assert [event["event"] for event in news["events"]] == ["worker_lost"]
    run.finish()
    news = view.refresh()
    assert news is not None
    assert news["head"]["status"] == "succeeded"
    assert [row.get("shares") for row in news["workers"]] == [452, 468, None]
    assert news["workers"][0]["peak_bytes"] == 406769664


def test_a_run_that_goes_back_to_a_checkpoint_is_told_anew(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, "run")
    run.steps(50)
    view = run_view(run.path)
    view.snapshot()
    run._metrics.keep_only(lambda line: line["step"] <= 20)
    news = view.refresh()
    assert news is not None
    assert news["reset"]["points"]["train"]["loss"]["x"] == list(range(1, 21))
    run.close()


def test_a_long_run_is_told_in_few_points(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, "run", num_steps=20_000)
    run.steps(20_000)
    whole = run_view(run.path).snapshot()
    assert max(len(each["x"]) for split in whole["points"].values() for each in split.values()) <= 1200
    assert whole["points"]["train"]["loss"]["x"][-1] == 20_000
    run.close()


def test_damaged_files_are_told_of_and_what_is_whole_is_shown(tmp_path: Path) -> None:
    view = run_view(damaged_run(tmp_path))
    whole = view.snapshot()
    assert whole["head"]["status"] == "damaged"
    assert whole["points"]["train"]["loss"] == {"x": [1, 2], "y": [2.3, 2.1]}
    problems = "\n".join(whole["head"]["problems"])
    assert "result.json is half-written" in problems
    assert "metrics.jsonl: 2 lines are no JSON" in problems
    assert "config.yaml is damaged" in problems
    json.dumps(whole, allow_nan=False)


def test_a_search_tells_new_trials_only_and_those_that_run(tmp_path: Path) -> None:
    search = random_search(tmp_path, trials=12)
    view = search_view(search.path)
    whole = view.snapshot()
    assert (len(whole["table"]["rows"]), whole["table"]["is_whole"]) == (12, True)
    assert view.refresh() is None
    search.append("lineage", trial=12, parent=None, step=0, change="", config={"train.optimizer.lr": 0.5})
    search.append("reports", trial=12, step=20, time_s=1.0, metrics={"accuracy": 0.4})
    news = view.refresh()
    assert news is not None
    assert news["table"]["rows"] == []
    assert [(row["trial"], row["status"], row["objective"]) for row in news["running"]] == [(12, "running", 0.4)]
    assert news["head"]["seconds"] == 1.0
    search.ended(TrialLine(12, "succeeded", 0.99, search.lines[0]["config"], steps=200, seconds=1.0))
    news = view.refresh()
    assert news is not None
    assert [row[0] for row in news["table"]["rows"]] == [12]
    assert not news["table"]["is_whole"]
    assert news["running"] == []
    assert (news["head"]["best_trial"], news["head"]["best"]["objective"]) == (12, 0.99)
    search.close()


def test_a_trial_over_a_bound_that_was_not_trained_is_not_counted_as_succeeded(tmp_path: Path) -> None:
    search = random_search(tmp_path, trials=2)
    search.ended(TrialLine(2, "succeeded", 0.1, {"train.optimizer.lr": 0.5}, more={"feasible": False}))
    counts = search_view(search.path).snapshot()["head"]["counts"]
    assert counts["over a bound, not trained"] == 1
    assert sum(counts.values()) == 3
    search.close()


def test_a_column_that_is_new_has_the_whole_table_told(tmp_path: Path) -> None:
    search = random_search(tmp_path, trials=3)
    view = search_view(search.path)
    assert "parameters" not in view.snapshot()["table"]["columns"]
    search.ended(TrialLine(3, "succeeded", 0.5, {"train.optimizer.lr": 0.5}, parameters=7))
    news = view.refresh()
    assert news is not None
    assert news["table"]["is_whole"]
    assert "parameters" in news["table"]["columns"]
    assert len(news["table"]["rows"]) == 4
    search.close()


def test_the_copies_of_a_population_are_told_with_its_schedule(tmp_path: Path) -> None:
    search = population_search(tmp_path)
    view = search_view(search.path)
    view.snapshot()
    found = view.figures()
    assert len(found["copies"]) == 22
    assert all(copy["step"] % 50 == 0 and copy["parent"] != copy["trial"] for copy in found["copies"])
    assert set(found["schedule"]["keys"]) == {"train.optimizer.lr", "train.optimizer.momentum"}
    assert found is view.figures()
    search.close()


def test_a_trial_is_told_with_its_network_and_its_ancestors(tmp_path: Path) -> None:
    search = evolution_search(tmp_path, trials=30)
    view = search_view(search.path)
    view.snapshot()
    child = next(line for line in reversed(search.lines) if line["parent"] is not None)
    found = view.trial(child["trial"])
    assert found is not None
    family = [each["trial"] for each in found["ancestors"]]
    assert family[-1] == child["trial"]
    assert family[-2] == child["parent"]
    assert all(each["network"].startswith("<svg") for each in found["ancestors"])
    assert 'style="' not in found["network"]
    assert view.trial(999) is None
    search.close()


def test_the_best_of_a_population_is_shown_with_the_hyper_parameters_it_was_the_best_with(tmp_path: Path) -> None:
    search = random_search(tmp_path, trials=3)
    early, late = ({"train.optimizer.lr": value} for value in (0.3, 0.1))
    search.ended(TrialLine(4, "succeeded", 0.999, {"train.optimizer.lr": 0.2}, steps=200))
    search.ended(TrialLine(3, "succeeded", 0.999, late, steps=200, more={"best_config": early}))
    told = search_view(search.path).snapshot()["head"]
    assert (told["best_trial"], told["best"]["config"]) == (3, early)
    search.close()


def test_the_best_network_is_told_as_a_person_reads_it(tmp_path: Path) -> None:
    search = evolution_search(tmp_path, trials=8)
    best = max(search.lines, key=lambda line: line["objective"])
    told = search_view(search.path).snapshot()["head"]["best"]
    assert told["measures"] == {name: best[name] for name in ("parameters", "flops", "latency_ms")}
    assert told["network"] == make_space("chain", channels=[8, 16, 32], widths=[32, 64]).text(best["genome"])
    search.close()


def test_the_space_of_a_user_is_not_run_to_draw_it(tmp_path: Path) -> None:
    search = random_search(tmp_path, trials=3)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\n")
    config = search.paths.config
    config.write_text(config.read_text() + f"  architecture: {{space: '{tmp_path}/own.py:Mine'}}\n")
    search.ended(TrialLine(3, "succeeded", 0.5, genome=[1, 2]))
    view = search_view(search.path)
    view.snapshot()
    found = view.trial(3)
    assert found is not None
    assert found["network"] is None
    assert not (tmp_path / "was-run").exists()
    search.close()


@pytest.mark.parametrize(
    "line",
    [
        {"trial": "x", "status": "succeeded"},
        {"trial": 90},
        {"trial": 91, "status": 7, "objective": "high", "config": [1]},
        {"trial": 92, "status": "failed", "objective": None, "config": None, "genome": {"a": {"b": []}}},
        {"trial": 93, "status": "succeeded", "objective": 0.5, "objectives": [1], "steps": "many"},
    ],
)
def test_lines_that_no_search_writes_break_no_page(tmp_path: Path, line: dict[str, Any]) -> None:
    search = random_search(tmp_path, trials=9)
    for log in ("trials", "reports", "lineage"):
        search.append(log, **line)
    search.append("reports", trial=1, step=None, metrics={"accuracy": "x"})
    search.append("lineage", trial=1, parent="nobody", step=3)
    view = search_view(search.path)
    json.dumps([view.snapshot(), view.figures(), view.importance()()], allow_nan=False)
    search.close()


def test_a_line_of_descent_ends_where_it_would_go_round() -> None:
    nodes = [{"trial": 2, "parent": 1}, {"trial": 1, "parent": 3}, {"trial": 3, "parent": 2}]
    assert ancestors(2, nodes) == [3, 1, 2]
    assert ancestors(7, nodes) == [7]
