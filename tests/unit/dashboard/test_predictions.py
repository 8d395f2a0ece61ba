"""Runs that were predicted are listed with what their steps took; others are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestray.dashboard import predictions as module
from orchestray.dashboard.listing import Library
from orchestray.dashboard.predictions import predictions
from orchestray.platform.run.directory import RunPaths, read_result
from support.run_directories import WrittenRun


def test_a_predicted_run_is_listed_with_its_scheme_and_its_error(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, "predicted", num_steps=3)
    run.steps(3)
    assert predictions(Library(tmp_path)) == []  # it goes on
    run.finish()
    (row,) = predictions(Library(tmp_path))
    assert (row["name"], row["scheme"]) == ("predicted", "data 2, parameter server")
    assert (row["predicted_s"], row["measured_s"], row["interval_s"]) == (0.019, 0.02, [0.017, 0.0205])
    assert row["error"] == pytest.approx(-0.05)


@pytest.mark.parametrize(
    "predicted", [None, {}, {"step_s": 0.1}, {"step_s": 0, "measured_step_s": 1}, {"step_s": "1", "measured_step_s": 1}]
)
def test_runs_without_a_prediction_and_damaged_ones_are_left_out(tmp_path: Path, predicted: object) -> None:
    for name, text in (("one", json.dumps({"status": "succeeded", "predicted": predicted})), ("two", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    assert predictions(Library(tmp_path)) == []


def test_a_run_is_read_again_only_when_its_result_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def reading(paths: RunPaths) -> dict[str, Any] | None:
        read.append(paths.path)
        return read_result(paths)

    monkeypatch.setattr(module, "read_result", reading)
    (tmp_path / "run").mkdir()
    for step_s in (0.1, 0.25):
        result = {"status": "succeeded", "predicted": {"step_s": step_s, "measured_step_s": 0.2}}
        (tmp_path / "run" / "result.json").write_text(json.dumps(result))
        read.clear()
        assert [row["predicted_s"] for row in predictions(Library(tmp_path))] == [step_s]
        assert predictions(Library(tmp_path)) == predictions(Library(tmp_path))
        assert len(read) == 1
