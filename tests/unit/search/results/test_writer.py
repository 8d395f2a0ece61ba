"""Files that a search leaves behind, as they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestray.platform.errors import RunNameError
from orchestray.search.results.paths import is_search
from orchestray.search.results.schema import TrialLine
from orchestray.search.results.writer import SearchRecords
from support.cli import read_lines

LINE = TrialLine(0, "succeeded", 0.9, {"train.optimizer.lr": 0.1}, parent=None, steps=10, seconds=1.5)


def test_a_line_has_what_the_contract_names_and_nothing_unknown(tmp_path: Path) -> None:
    with SearchRecords.create(tmp_path, "a") as records:
        records.finished(LINE)
        records.finished(TrialLine(1, "failed", None, genome=[1, 2], error="out of memory", parameters=7))
    assert read_lines(tmp_path / "a" / "trials.jsonl") == [
        {
            "trial": 0,
            "status": "succeeded",
            "objective": 0.9,
            "config": {"train.optimizer.lr": 0.1},
            "parent": None,
            "steps": 10,
            "seconds": 1.5,
            "error": None,
        },
        {
            "trial": 1,
            "status": "failed",
            "objective": None,
            "config": {},
            "genome": [1, 2],
            "parent": None,
            "steps": 0,
            "seconds": 0.0,
            "error": "out of memory",
            "parameters": 7,
        },
    ]


def test_a_directory_with_a_config_and_trials_is_a_search(tmp_path: Path) -> None:
    with SearchRecords.create(tmp_path, "a") as records:
        assert not is_search(records.paths.path)
        records.write_config("name: a")
        assert is_search(records.paths.path)


def test_a_trial_that_has_ended_is_written_once_over_all_attempts(tmp_path: Path) -> None:
    with SearchRecords.create(tmp_path, "a") as records:
        records.finished(LINE)
        records.finished(LINE)
    with SearchRecords.open_existing(tmp_path, "a") as records:
        records.finished(LINE)
        assert list(records.lines) == [0]
    assert len(read_lines(tmp_path / "a" / "trials.jsonl")) == 1


def test_a_torn_line_of_a_killed_search_is_cut_off_and_the_rest_is_read_back(tmp_path: Path) -> None:
    with SearchRecords.create(tmp_path, "a") as records:
        records.finished(LINE)
        records.journal.append("ask", answer={"trial": 0})
    for name in ("trials.jsonl", "journal.jsonl"):
        with (tmp_path / "a" / name).open("a") as file:
            file.write('{"trial": 1, "sta')
    with SearchRecords.open_existing(tmp_path, "a") as records:
        assert list(records.lines) == [0]
        records.journal.append("ask", answer={"trial": 1})
        assert records.journal.entries() == [
            {"call": "ask", "answer": {"trial": 0}},
            {"call": "ask", "answer": {"trial": 1}},
        ]


def test_the_lineage_holds_each_node_once_and_survives_a_kill_between_two_rewritings(tmp_path: Path) -> None:
    records = SearchRecords.create(tmp_path, "a")
    records.lineage(0, None, 0, "")
    records.lineage(1, 0, 0, "lr x 1.2")
    records.lineage(1, 0, 50, "takes the weights of 0")
    records.directory.close()  # as if killed: nothing is flushed
    with SearchRecords.open_existing(tmp_path, "a") as records:
        records.lineage(1, 0, 0, "lr x 1.2")
    nodes = json.loads((tmp_path / "a" / "lineage.json").read_text())["nodes"]
    assert nodes == [
        {"trial": 0, "parent": None, "step": 0, "change": ""},
        {"trial": 1, "parent": 0, "step": 0, "change": "lr x 1.2"},
        {"trial": 1, "parent": 0, "step": 50, "change": "takes the weights of 0"},
    ]


def test_the_time_of_a_search_goes_on_where_it_was_left(tmp_path: Path) -> None:
    with SearchRecords.create(tmp_path, "a") as records:
        records.report(0, 5, {"accuracy": 0.5})
    path = tmp_path / "a" / "reports.jsonl"
    path.write_text(path.read_text().replace('"time_s":0.', '"time_s":1000.'))
    with SearchRecords.open_existing(tmp_path, "a") as records:
        assert 1000.0 <= records.seconds < 1100.0


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_time_of_a_search_without_a_report_counts_too_and_that_of_looking_at_it_does_not(
    tmp_path: Path, is_killed: bool
) -> None:
    records = SearchRecords.create(tmp_path, "a")
    records._begin_s -= 1000.0
    records.keep_time()
    records._begin_s -= 1000.0
    if is_killed:
        records.directory.close()  # nothing more is written
    else:
        records.close()
    least = 1000.0 if is_killed else 2000.0
    for _ in range(2):
        with SearchRecords.open_existing(tmp_path, "a") as records:
            assert least <= records.seconds < least + 100.0
            records._begin_s -= 5000.0


def test_what_a_search_takes_beyond_its_limit_does_not_count_and_what_was_used_before_does(tmp_path: Path) -> None:
    SearchRecords.create(tmp_path, "a").close()
    for limit_s, counted in ((500.0, 500.0), (300.0, 500.0), (700.0, 700.0)):
        with SearchRecords.open_existing(tmp_path, "a") as records:
            records._begin_s -= 1000.0
            records.keep_time(limit_s)
        assert json.loads((tmp_path / "a" / "elapsed.json").read_text()) == {"seconds": counted}


def test_a_damaged_time_is_that_of_the_last_report(tmp_path: Path) -> None:
    with SearchRecords.create(tmp_path, "a") as records:
        records.keep_time()
    (tmp_path / "a" / "elapsed.json").write_text("{")
    with SearchRecords.open_existing(tmp_path, "a") as records:
        assert 0.0 <= records.seconds < 100.0


def test_tensorboard_reads_the_scalars_and_hyper_parameters_of_more_trials_than_files_are_open(tmp_path: Path) -> None:
    with SearchRecords.create(tmp_path, "a") as records:
        for step in (5, 10):
            for trial in range(20):
                records.report(trial, step, {"accuracy": 0.5})
        for trial in range(20):
            records.finished(TrialLine(trial, "succeeded", 0.5, {"task.hidden": [8], "train.optimizer.lr": 0.1}))
    for trial in range(20):
        written = b"".join(
            file.read_bytes() for file in sorted((tmp_path / "a" / "tensorboard" / f"trial-{trial:05d}").iterdir())
        )
        assert written.count(b"accuracy") >= 2
        assert b"_hparams_/session_start_info" in written
        assert b"train.optimizer.lr" in written


def test_a_name_in_use_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with SearchRecords.create(tmp_path, "a"):
        pass
    with pytest.raises(RunNameError, match="in use"):
        SearchRecords.create(tmp_path, "a")
    with pytest.raises(RunNameError, match="no run"):
        SearchRecords.open_existing(tmp_path, "b")


def test_a_trial_that_goes_on_after_all_has_one_line(tmp_path: Path) -> None:
    with SearchRecords.create(tmp_path, "again") as records:
        for trial in (0, 1):
            records.finished(TrialLine(trial, "stopped", 0.5, {"lr": 0.1}, steps=3))
        records.reopen([1, 2])
        assert list(records.lines) == [0]
        records.finished(TrialLine(1, "succeeded", 0.75, {"lr": 0.1}, steps=6))
    with SearchRecords.open_existing(tmp_path, "again") as records:
        assert [(line["trial"], line["status"]) for line in records.lines.values()] == [
            (0, "stopped"),
            (1, "succeeded"),
        ]
