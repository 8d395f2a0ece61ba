"""A search whose driver is killed: resumed it loses no finished trial, repeats none, and ends as if not killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.cli import Running, orchestray, read_lines

_VALUES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3]
_STEPS = 40


def test_a_killed_search_goes_on_as_if_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    slow = tmp_path / "slow"  # but for the first trial of each of the two processes
    slow.touch()
    config = {
        "name": "killed",
        "base": {
            "name": "trial",
            "task": {"type": "support.slow_digits:SlowDigits", "hidden": [16], "slow": str(slow), "quick": _STEPS},
            "train": {"batch_size": 8, "steps": _STEPS, "optimizer": {"type": "sgd", "lr": 0.1}},
        },
        "search": {
            "method": {"type": "grid"},
            "objective": {"metric": "accuracy"},
            "space": {"train.optimizer.lr": {"type": "choice", "values": _VALUES}},
            "parallel": 2,
        },
    }
    file = tmp_path / "killed.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    path = tmp_path / "runs" / "killed"
    running = Running(["search", file, "--runs-dir", tmp_path / "runs", "--quiet"], path)
    running.until(
        "two trials", lambda: (path / "trials.jsonl").exists() and len(read_lines(path / "trials.jsonl")) >= 2
    )
    running.process.kill()
    running.process.communicate()
    slow.unlink()
    done = read_lines(path / "trials.jsonl")
    assert len(done) < len(_VALUES)
    again = orchestray("search", file, "--runs-dir", tmp_path / "runs", "--quiet", "--resume")
    assert again.returncode == 0, again.stderr
    lines = read_lines(path / "trials.jsonl")
    assert lines[: len(done)] == done
    assert sorted(line["config"]["train.optimizer.lr"] for line in lines) == _VALUES
    assert {(line["status"], line["steps"]) for line in lines} == {("succeeded", _STEPS)}
    twin = orchestray("search", file, "--runs-dir", tmp_path / "runs", "--quiet", "--name", "whole")
    assert twin.returncode == 0, twin.stderr
    whole = path.with_name("whole")
    assert _objectives(path) == _objectives(whole)
    model = Path("best") / "model" / "model.safetensors"
    assert (path / model).read_bytes() == (whole / model).read_bytes()


def _objectives(path: Path) -> dict[int, float]:
    """Of each trial of a search."""
    return {line["trial"]: line["objective"] for line in read_lines(path / "trials.jsonl")}
