"""Logs and series are read as they grow, and what is damaged is passed over."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from orchestray.dashboard.follow import JsonFile, LogFollower
from orchestray.dashboard.series import Series, thinned
from orchestray.platform.run.metrics import JsonLinesLog


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_lines_that_were_not_there_before_are_read(tmp_path: Path) -> None:
    log = LogFollower(tmp_path / "log.jsonl")
    assert log.read().lines == []
    append(log.path, '{"step": 1}\n{"step": 2}\n')
    assert log.read().lines == [{"step": 1}, {"step": 2}]
    append(log.path, '{"step": 3}\n')
    fresh = log.read()
    assert (fresh.lines, fresh.is_reset) == ([{"step": 3}], False)
    assert log.read().lines == []


def test_a_line_that_is_being_written_is_taken_once_it_is_whole(tmp_path: Path) -> None:
    log = LogFollower(tmp_path / "log.jsonl")
    append(log.path, '{"step": 1}\n{"st')
    assert log.read().lines == [{"step": 1}]
    append(log.path, 'ep": 2}\n')
    assert log.read().lines == [{"step": 2}]
    assert log.num_broken == 0


def test_lines_that_are_no_objects_are_counted_and_left_out(tmp_path: Path) -> None:
    log = LogFollower(tmp_path / "log.jsonl")
    log.path.write_bytes(b'{"step": 1}\n\xff\x00\n[1]\n7\n{"step": 2}\n')
    assert log.read().lines == [{"step": 1}, {"step": 2}]
    assert log.num_broken == 3


def test_a_log_that_was_rewritten_begins_anew(tmp_path: Path) -> None:
    """Rewrite the log as a run does that goes back to a checkpoint."""
    path = tmp_path / "log.jsonl"
    log = LogFollower(path)
    with JsonLinesLog(path) as writer:
        writer.append_lines({"step": step} for step in range(1, 6))
        writer.flush()
        assert len(log.read().lines) == 5
        writer.keep_only(lambda line: line["step"] <= 2)
        fresh = log.read()
        assert fresh.is_reset
        assert [line["step"] for line in fresh.lines] == [1, 2]
        writer.append_lines([{"step": 3}])
        writer.flush()
        assert log.read().lines == [{"step": 3}]


def test_lines_longer_than_a_chunk_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestray.dashboard.follow._CHUNK_BYTES", 16)
    log = LogFollower(tmp_path / "log.jsonl")
    lines = [{"text": "x" * length} for length in (1, 15, 16, 17, 100)]
    append(log.path, "".join(json.dumps(line) + "\n" for line in lines))
    assert log.read().lines == lines


def test_a_half_written_json_file_is_a_problem_and_not_an_error(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "result.json")
    file.read()
    assert (file.value, file.problem) == (None, None)
    (tmp_path / "result.json").write_text('{"status": ')
    assert file.read()
    assert "half-written" in (file.problem or "")
    (tmp_path / "result.json").write_text('{"status": "succeeded"}')
    assert file.read()
    assert (file.value, file.problem) == ({"status": "succeeded"}, None)


def test_a_thinned_line_keeps_its_ends_its_extremes_and_its_order() -> None:
    rng = np.random.default_rng(0)
    x, y = np.arange(100_000.0), rng.normal(size=100_000)
    y[33_333], y[77_777] = 50.0, -60.0
    points = thinned(x, y, 1200)
    assert len(points["x"]) <= 1200
    assert points["x"] == sorted(points["x"])
    assert (points["x"][0], points["x"][-1]) == (0, 99_999)
    assert {50.0, -60.0} <= set(points["y"])
    assert all(y[place] == value for place, value in zip(points["x"], points["y"], strict=True))


def test_a_short_line_is_not_thinned_and_a_gap_is_null() -> None:
    series = Series()
    for step, value in enumerate([1.0, None, math.inf, 4.0], start=1):
        series.append(step, value)
    assert series.points() == {"x": [1, 2, 3, 4], "y": [1.0, None, None, 4.0]}
    assert series.points(start=3) == {"x": [4], "y": [4.0]}
