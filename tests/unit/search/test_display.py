"""The display of a search while it runs."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from orchestray.search.display import SearchProgress, SearchView, closing_rows, live_table, values_text
from orchestray.search.results.figures import Goal
from orchestray.search.results.schema import TrialChange

GOAL = Goal("accuracy", "max")
RESULT = {
    "status": "succeeded",
    "trials": 2,
    "counts": {"succeeded": 1, "stopped": 0, "failed": 1},
    "best": {"trial": 1, "objective": 0.9, "config": {"lr": 0.1}},
    "seconds": 2.0,
}


def test_trials_over_a_bound_are_named_beside_those_that_were_trained() -> None:
    rows = dict(closing_rows({**RESULT, "untrained": 3}, GOAL, Path("runs/a")))
    assert rows["trials"] == "2  (1 succeeded, 1 failed; 3 not trained, over a bound)"
    assert dict(closing_rows(RESULT, GOAL, Path("runs/a")))["trials"] == "2  (1 succeeded, 1 failed)"


def view_of(*changes: TrialChange) -> SearchView:
    view = SearchView("a", GOAL, 4)
    for change in changes:
        view.update(change)
    return view


def test_trials_are_counted_once_and_the_best_is_kept_however_it_goes_on() -> None:
    view = view_of(
        TrialChange(0, "running", 5, 0.5, {"lr": 0.1}),
        TrialChange(1, "running", 5, 0.9, {"lr": 0.2}),
        TrialChange(1, "running", 9, 0.4, {"lr": 0.2}),
        TrialChange(0, "succeeded", 9, 0.6, {"lr": 0.1}),
        TrialChange(2, "failed", 0, 1.0, error="broke"),
        TrialChange(3, "waiting", 3, 0.3),
    )
    assert view.counts_text() == "2/4 trials: 1 succeeded, 1 failed; 1 running, 1 waiting"
    assert view.best_text() == "best accuracy 0.9 (trial 1): lr=0.2"
    assert view.num_ended == 2


def test_less_is_better_where_the_goal_says_so_and_equals_leave_the_first() -> None:
    view = SearchView("a", Goal("loss", "min"), None)
    view.update(TrialChange(0, "succeeded", 1, 0.5))
    view.update(TrialChange(1, "succeeded", 1, 0.5))
    assert view.best_text() == "best loss 0.5 (trial 0)"
    view.update(TrialChange(2, "succeeded", 1, 0.1))
    assert view.best_text() == "best loss 0.1 (trial 2)"


def test_a_search_that_goes_on_begins_with_what_was_found() -> None:
    view = SearchView("a", GOAL, 4)
    view.begin_with({0: {"trial": 0, "status": "succeeded", "steps": 3, "objective": 0.7, "config": {"lr": 1}}})
    assert view.counts_text() == "1/4 trials: 1 succeeded"
    assert view.best_text() == "best accuracy 0.7 (trial 0): lr=1"


def test_a_trial_that_goes_on_after_all_is_counted_once() -> None:
    view = SearchView("a", GOAL, 4)
    for status in ("stopped", "running", "succeeded"):
        view.update(TrialChange(0, status, 3, 0.5))
        assert view.num_ended == (status != "running")
    assert view.counts_text() == "1/4 trials: 1 succeeded"


def test_a_key_is_named_by_its_end_where_no_other_ends_like_it() -> None:
    assert values_text({"train.optimizer.lr": 0.1, "train.batch_size": 32}) == "lr=0.1  batch_size=32"
    assert values_text({"a.width": 1, "b.width": 2, "c.depth": 3}) == "a.width=1  b.width=2  depth=3"


def test_a_narrow_terminal_shows_how_each_trial_stands_before_what_it_is_made_of() -> None:
    view = view_of(TrialChange(0, "running", 50, 0.9, {f"task.long_name_{key}": 0.1 for key in range(9)}))
    console = Console(width=60, file=io.StringIO())
    with console.capture() as captured:
        console.print(live_table(view, 3.0))
    assert "0  running  step 50  accuracy 0.9" in captured.get()


def test_the_live_table_has_a_line_for_each_of_some_running_trials() -> None:
    view = view_of(*(TrialChange(trial, "running", 5, 0.1 * trial, {"lr": 0.1}) for trial in range(12)))
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(live_table(view, 3.0))
    lines = captured.get().splitlines()
    assert lines[0].split() == ["a", "0/4", "trials;", "12", "running", "3.0", "s"]
    assert sum("running" in line for line in lines[1:]) == 8
    assert "and 4 more" in lines[-1]
    assert max(map(len, lines)) <= 100


def test_plain_lines_tell_of_better_trials_and_failures_and_close_with_where_it_is(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    with (
        console.capture() as captured,
        SearchProgress(SearchView("a", GOAL, 2), directory=tmp_path, console=console) as shown,
    ):
        shown.change(TrialChange(0, "failed", error="no such column"))
        shown.change(TrialChange(1, "running", 5, 0.5))
        shown.change(TrialChange(1, "succeeded", 9, 0.9, {"lr": 0.1}))
        shown.event("stopping")
        shown.finish(RESULT)
    said = captured.get() or console.file.getvalue()  # type: ignore[attr-defined]
    assert "a: trial 0 failed: no such column" in said
    assert "a: 2/2 trials: 1 failed, 1 succeeded  best accuracy 0.9 (trial 1): lr=0.1" in said
    assert "a: stopping" in said
    assert said.splitlines()[-1].endswith("report.html")


def test_on_a_terminal_failures_and_events_stay_above_the_table_and_the_end_is_a_box(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100)
    with SearchProgress(SearchView("a", GOAL, 2), directory=tmp_path, console=console) as shown:
        shown.change(TrialChange(0, "failed", error="no such [column]"))
        shown.event("stopping")
        shown.finish(RESULT)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    places = [said.index(text) for text in ("trial 0 failed: no such [column]", "stopping", "a  succeeded", "report")]
    assert places == sorted(places)
    assert "0/2 trials" in said
    assert said.rstrip().endswith("╯")


def test_the_closing_rows_name_what_was_found_and_the_run_to_serve(tmp_path: Path) -> None:
    rows = dict(closing_rows(RESULT, GOAL, tmp_path))
    assert rows["best"] == "accuracy 0.9  (trial 1)"
    assert rows["trials"] == "2  (1 succeeded, 1 failed)"
    assert rows["lr"] == "0.1"
    assert rows["best run"] == str(tmp_path / "best")
    assert dict(closing_rows({**RESULT, "cut_off": "trial 2 early"}, GOAL, tmp_path))["cut off"] == "trial 2 early"
    assert "best run" not in dict(closing_rows({**RESULT, "best": None}, GOAL, tmp_path))
