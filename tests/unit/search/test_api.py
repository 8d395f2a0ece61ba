"""Files and messages of `orchestray.search` however a search ends; a loop in this process trains instead of Ray."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import orchestray
from orchestray.platform.errors import ConfigError, Interrupted, RunNameError, TrainingError
from orchestray.search.api import result_of, search
from orchestray.search.config.load import load_search_config
from orchestray.search.engine.session import MemoryJournal, MethodSession, SearchError
from orchestray.search.methods.base import Finished, Report
from orchestray.search.registry.check import method_of
from orchestray.search.results.run import load_search
from orchestray.search.results.schema import OUT_OF_TIME, SearchOutcome, TrialChange, TrialLine
from orchestray.search.results.writer import SearchRecords
from support.search_configs import GOOD

Score = Callable[[dict[str, Any], int], float]


class Loop:
    """An engine: one trial after the other, scored by a function."""

    def __init__(self, score: Score, num_trials: int | None = None) -> None:
        self.score, self.num_trials = score, num_trials

    def run_search(
        self,
        config: Any,
        records: Any,
        *,
        session: Any,
        address: Any,
        resume: bool,
        stop: threading.Event,
        on_change: Any,
        notify: Any,
        said: Any,
    ) -> SearchOutcome:
        method, errors, count = method_of(config), [], 0
        while (proposal := method.ask()) is not None and not stop.is_set():
            if self.num_trials is not None and count == self.num_trials:
                return SearchOutcome("interrupted")
            count += 1
            trial, changes = proposal.trial, dict(proposal.changes)
            records.lineage(trial, proposal.parent, 0, proposal.change)
            steps = config.steps_per_trial
            try:
                values = [self.score(changes, step) for step in (steps // 2, steps)]
            except ArithmeticError as error:
                errors.append(str(error))
                records.finished(TrialLine(trial, "failed", None, changes, error=str(error)))
                on_change(TrialChange(trial, "failed", error=str(error)))
                method.tell(Finished(trial, "failed", error=str(error)))
                continue
            for step, value in zip((steps // 2, steps), values, strict=True):
                records.report(trial, step, {"accuracy": value})
                method.report(Report(trial, step, value))
                on_change(TrialChange(trial, "running", step, value, changes))
            records.finished(TrialLine(trial, "succeeded", max(values), changes, steps=steps))
            on_change(TrialChange(trial, "succeeded", steps, max(values), changes))
            method.tell(Finished(trial, "succeeded", steps, max(values)))
        if len(errors) == len(records.lines):
            return SearchOutcome("failed", error=f"every trial failed; the first: {errors[0]}")
        return SearchOutcome("succeeded")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets what trains."""

    def use(score: Score, num_trials: int | None = None) -> None:
        module = ModuleType("orchestray.search.engine.run")
        module.run_search = Loop(score, num_trials).run_search  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    use(lambda changes, step: step * (1.0 - changes["train.optimizer.lr"]))
    return use


def write_journal(directory: Path, *, changed_to: float | None = None) -> None:
    """Write the journal of a search whose first trial was proposed; its learning rate may be changed."""
    journal = MemoryJournal()
    MethodSession(method_of(load_search_config(GOOD)), journal).ask()
    (entry,) = journal.entries()
    if changed_to is not None:
        entry["proposal"]["changes"] = dict.fromkeys(entry["proposal"]["changes"], changed_to)
    (directory / "journal.jsonl").write_text(json.dumps(entry) + "\n")


def test_a_search_leaves_the_files_of_the_contract(engine: Any, tmp_path: Path) -> None:
    found = search(GOOD, runs_dir=tmp_path)
    lines = found.lines()
    assert [line["trial"] for line in lines] == [0, 1, 2, 3]
    best = max(lines, key=lambda line: line["objective"])
    assert found.result["best"] == {name: best[name] for name in ("trial", "objective", "config")}
    assert (found.result["status"], found.result["trials"], found.result["error"]) == ("succeeded", 4, None)
    assert found.trials().column("objective").to_pylist() == [line["objective"] for line in lines]
    assert found.reports().num_rows == 8
    assert {path.name for path in found.path.iterdir()} >= {
        "config.yaml",
        "trials.jsonl",
        "lineage.json",
        "result.json",
        "report.html",
        "tensorboard",
    }
    assert found.config.name == "a"
    assert load_search(tmp_path / "a").result == found.result


def test_a_result_names_the_trials_that_the_time_limit_cut_off_and_those_without_a_value(tmp_path: Path) -> None:
    config = load_search_config(GOOD)
    with SearchRecords.create(tmp_path, "timed") as records:
        records.finished(TrialLine(0, "succeeded", 0.9))
        records.finished(TrialLine(1, "stopped", 0.5, more={"reason": "rung 1"}))
        assert "cut_off" not in result_of(config, records, SearchOutcome("succeeded"))
        records.finished(TrialLine(3, "stopped", None, more={"reason": OUT_OF_TIME}))
        records.finished(TrialLine(2, "stopped", 0.7, more={"reason": OUT_OF_TIME}))
        result = result_of(config, records, SearchOutcome("succeeded"))
        assert "ended trials 2, 3 early; the values of trial 3 are missing: no report" in result["cut_off"]
        assert "--resume" in result["cut_off"]
        assert result["best"]["trial"] == 0
        for trial in range(4, 16):
            records.finished(TrialLine(trial, "stopped", 0.1, more={"reason": OUT_OF_TIME}))
        sentence = result_of(config, records, SearchOutcome("succeeded"))["cut_off"]
        assert "trials 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 4 more early" in sentence


def test_a_search_whose_every_trial_fails_says_the_first_error_and_leaves_a_report(engine: Any, tmp_path: Path) -> None:
    def fail(changes: dict[str, Any], step: int) -> float:
        raise ArithmeticError("the loss is no number")

    engine(fail)
    with pytest.raises(TrainingError, match="the loss is no number") as caught:
        search(GOOD, runs_dir=tmp_path)
    assert caught.value.exit_status == 1
    result = load_search(tmp_path / "a").result
    assert (result["status"], result["best"], result["counts"]["failed"]) == ("failed", None, 4)
    assert "the loss is no number" in result["error"]
    assert (tmp_path / "a" / "report.html").is_file()


def test_an_engine_that_breaks_leaves_a_result(engine: Any, tmp_path: Path) -> None:
    def broken(changes: dict[str, Any], step: int) -> float:
        raise RuntimeError("a mistake of ours")

    engine(broken)
    with pytest.raises(RuntimeError):
        search(GOOD, runs_dir=tmp_path)
    assert load_search(tmp_path / "a").result["error"] == "RuntimeError: a mistake of ours"


def test_an_interrupted_search_goes_on_and_a_finished_one_has_nothing_left_to_do(engine: Any, tmp_path: Path) -> None:
    engine(lambda changes, step: 1.0, num_trials=2)
    with pytest.raises(Interrupted) as caught:
        search(GOOD, runs_dir=tmp_path)
    assert caught.value.exit_status == 130
    assert load_search(tmp_path / "a").result["status"] == "interrupted"
    engine(lambda changes, step: 1.0)
    found = search(GOOD, runs_dir=tmp_path, resume=True)
    assert [line["trial"] for line in found.lines()] == [0, 1, 2, 3]

    def never(changes: dict[str, Any], step: int) -> float:
        raise AssertionError("nothing is left to do")

    engine(never)
    report = tmp_path / "a" / "report.html"
    whole = report.read_text()
    report.unlink()  # as on a disk that was full by then
    assert search(GOOD, runs_dir=tmp_path, resume=True).result == found.result
    assert report.read_text() == whole


def test_a_resumed_search_may_be_spread_otherwise_but_not_be_another_search(engine: Any, tmp_path: Path) -> None:
    engine(lambda changes, step: 1.0, num_trials=2)
    with pytest.raises(Interrupted):
        search(GOOD, runs_dir=tmp_path)
    write_journal(tmp_path / "a")
    with pytest.raises(ConfigError) as caught:
        search(GOOD, overrides=["search.seed=1", "search.budget.trials=3"], runs_dir=tmp_path, resume=True)
    assert [line.partition(": a ")[2] for line in caught.value.problems] == [
        "resumed search may not change search.budget.trials (was 4, now 3; it may only be raised)",
        "resumed search may not change search.seed (was 0, now 1)",
    ]
    engine(lambda changes, step: 1.0)
    found = search(GOOD, overrides=["search.parallel=2", "search.budget.trials=6"], runs_dir=tmp_path, resume=True)
    assert found.result["trials"] == 6


def test_a_search_that_goes_on_with_another_task_file_than_it_was_begun_with_says_so(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = "".join(f"    def {name}(self, *a): ...\n" for name in ("build_model", "dataset", "to_batch", "loss"))
    task = f"class Mine:\n{methods}    def metrics(self, *a):\n        return {{'accuracy': 1}}\n"
    (tmp_path / "mine.py").write_text(task)
    config = {**GOOD, "base": {**GOOD["base"], "task": {"type": f"{tmp_path}/mine.py:Mine"}}}
    config["search"] = {**GOOD["search"], "objective": {"metric": "accuracy", "mode": "max"}}
    engine(lambda changes, step: 1.0, num_trials=1)
    for text, is_told in ((task, False), (task, False), (f"{task}# other\n", True)):
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(Interrupted):
            search(config, runs_dir=tmp_path / "runs", resume=(tmp_path / "runs").exists(), quiet=False)
        said = capsys.readouterr().err
        assert ("other code than it was begun with: mine.py changed since" in " ".join(said.split())) == is_told


def test_more_trials_that_the_journal_does_not_allow_leave_the_finished_search_as_it_was(
    engine: Any, tmp_path: Path
) -> None:
    search(GOOD, runs_dir=tmp_path)
    write_journal(tmp_path / "a", changed_to=0.123)
    names = ("config.yaml", "result.json", "journal.jsonl")
    before = {name: (tmp_path / "a" / name).read_bytes() for name in names}
    with pytest.raises(SearchError, match="call 1 of its journal"):
        search(GOOD, overrides=["search.budget.trials=6"], runs_dir=tmp_path, resume=True)
    assert {name: (tmp_path / "a" / name).read_bytes() for name in names} == before
    assert search(GOOD, runs_dir=tmp_path, resume=True).result["status"] == "succeeded"


def test_a_name_in_use_one_that_is_not_there_and_a_run_are_refused(engine: Any, tmp_path: Path) -> None:
    search(GOOD, runs_dir=tmp_path)
    with pytest.raises(RunNameError, match="in use"):
        search(GOOD, runs_dir=tmp_path)
    with pytest.raises(RunNameError, match="no run 'b'"):
        search(GOOD, runs_dir=tmp_path, name="b", resume=True)
    (tmp_path / "c").mkdir()
    with pytest.raises(RunNameError, match="is no search"):
        search(GOOD, runs_dir=tmp_path, name="c", resume=True)
    with pytest.raises(RunNameError, match="is a search; the best run it has found"):
        orchestray.load_run(tmp_path / "a")


def test_several_objectives_leave_their_front(engine: Any, tmp_path: Path) -> None:
    source = {**GOOD, "search": {**GOOD["search"], "objective": [{"metric": "accuracy"}, {"metric": "loss"}]}}
    found = search(source, runs_dir=tmp_path)
    assert json.loads((found.path / "pareto.json").read_text()) == []  # this loop reports no objectives
    assert [goal["mode"] for goal in found.result["objectives"]] == ["max", "min"]


def test_a_config_that_the_method_cannot_search_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    source = {**GOOD, "search": {**GOOD["search"], "method": {"type": "spectral", "samples": 4}}}
    with pytest.raises(ConfigError, match="spectral"):
        search(source, runs_dir=tmp_path)
    assert not (tmp_path / "a").exists()


ORDERS = [
    "import orchestray; orchestray.search; import orchestray.search.methods.base",
    "import orchestray.search.methods.base; import orchestray",
    "from orchestray import search; import orchestray; import orchestray.search.api",
    "import orchestray; import orchestray.search.api",
    "import importlib, orchestray; orchestray.search; importlib.import_module('orchestray.search.results')",
]
IN_EACH_ORDER = f"""
import os, sys
import numpy, pydantic, yaml  # once for all

for lines in {ORDERS}:
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1] != 0:
            sys.exit("fails: " + lines)
        continue
    exec(lines)
    import orchestray, orchestray.search.registry.methods
    from orchestray.platform.errors import ConfigError
    assert orchestray.search.registry.methods.METHODS
    from orchestray import search
    for call in (search, orchestray.search):
        try:
            call("nowhere.yaml")
        except ConfigError as error:
            print(error, flush=True)
    os._exit(0)
"""


def test_the_package_can_be_called_and_imported_from_in_any_order(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_EACH_ORDER]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["nowhere.yaml: there is no such file"] * 2 * len(ORDERS)
