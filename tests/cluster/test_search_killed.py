"""A search whose driver is killed: resumed it loses no finished trial, repeats none, and ends as if not killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.cluster.cluster import Cluster
from support.cli import Running, beside, orchestray_here, python_path, read_lines

_VALUES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3]
_STEPS = 10


@pytest.mark.slow
def test_a_killed_search_goes_on_as_if_not_killed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = {
        "method": {"type": "grid"},
        "space": {"train.optimizer.lr": {"type": "choice", "values": _VALUES}},
        "parallel": 2,
    }
    config = _slow_at_first(tmp_path, monkeypatch, search, quick=_STEPS)  # the first trial of each of two processes
    killed, _ = _killed_and_whole(
        cluster, config, tmp_path, lambda path: len(read_lines(path / "trials.jsonl")) >= 2, trials=len(_VALUES)
    )
    lines = read_lines(killed / "trials.jsonl")
    assert sorted(line["config"]["train.optimizer.lr"] for line in lines) == _VALUES
    assert {(line["status"], line["steps"]) for line in lines} == {("succeeded", _STEPS)}


@pytest.mark.slow
def test_a_killed_synchronous_population_goes_on_with_the_same_copies_to_the_same_weights(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"type": "population_based_training", "population": 4, "interval_steps": 8, "synchronous": True}
    search = {
        "method": {**method, "fraction": 0.5},
        "space": {"train.optimizer.lr": {"type": "log_uniform", "low": 1e-3, "high": 1.0}},
        "budget": {"trials": 4, "steps_per_trial": 32},
        "parallel": 2,
    }

    def has_copied(path: Path) -> bool:
        return any(node["parent"] is not None for node in read_lines(path / "lineage.jsonl"))

    config = _slow_at_first(tmp_path, monkeypatch, search, quick=40)  # two members' 16 steps, and a few more
    killed, whole = _killed_and_whole(cluster, config, tmp_path, has_copied, trials=4)
    nodes = [_by_trial(path / "lineage.jsonl", "step", without="time_s") for path in (killed, whole)]
    assert nodes[0] == nodes[1]
    copies = [_copies(path) for path in (killed, whole)]
    assert copies[0] == copies[1] >= (sum(place[1] > 0 for place in nodes[1]), 1)


@pytest.mark.slow
def test_a_killed_regularized_evolution_goes_on_with_the_same_children(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run one trial at a time: with more of them a child depends on which of the others have ended."""
    search = {
        "method": {"type": "regularized_evolution", "population": 4, "sample_size": 4},
        "architecture": {"space": "chain", "layers": ["dense"], "widths": [8, 16, 32], "max_depth": 3},
        "budget": {"trials": 7, "steps_per_trial": 10},
    }

    def has_a_child(path: Path) -> bool:
        return any(line["parent"] is not None for line in read_lines(path / "trials.jsonl"))

    config = _slow_at_first(tmp_path, monkeypatch, search, quick=55)  # five trials, and the half of a sixth
    killed, whole = _killed_and_whole(cluster, config, tmp_path, has_a_child, trials=7)
    lines = [_by_trial(path / "trials.jsonl", without="seconds latency_ms") for path in (killed, whole)]
    assert lines[0] == lines[1]


def _slow_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: dict[str, Any], *, quick: int
) -> dict[str, Any]:
    """Return a search whose processes take ever longer after `quick` steps, as long as there is the file `slow`."""
    monkeypatch.setenv("PYTHONPATH", python_path(Path(__file__).parents[1]))
    slow = tmp_path / "slow"
    slow.touch()
    return {
        "name": "killed",
        "base": {
            "name": "trial",
            "task": {"type": "support.slow_digits:SlowDigits", "hidden": [16], "slow": str(slow), "quick": quick},
            "train": {"batch_size": 8, "steps": _STEPS, "optimizer": {"type": "sgd", "lr": 0.1}},
        },
        "search": {"objective": {"metric": "accuracy"}, **search},
    }


def _killed_and_whole(
    cluster: Cluster, config: dict[str, Any], tmp_path: Path, due: Callable[[Path], bool], *, trials: int
) -> tuple[Path, Path]:
    """Kill a search once it is due and resume it, and run another to its end; return both paths.

    The resumed search has lost no finished trial and repeated none. Both have come to the same.
    """
    file = tmp_path / "killed.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    path = tmp_path / "runs" / "killed"
    running = Running(["search", file, "--runs-dir", tmp_path / "runs", "--quiet"], path, env=beside(cluster))
    running.until("the moment to kill it", lambda: due(path))
    running.process.kill()
    running.process.communicate()
    (tmp_path / "slow").unlink()
    done = read_lines(path / "trials.jsonl")
    assert len(done) < trials
    for more in (["--resume"], ["--name", "whole", "search.parallel=1"]):
        ended = orchestray_here("search", file, "--runs-dir", tmp_path / "runs", "--quiet", *more)
        assert ended.returncode == 0, ended.stderr
    whole = path.with_name("whole")
    lines = read_lines(path / "trials.jsonl")
    assert lines[: len(done)] == done
    assert sorted(line["trial"] for line in lines) == list(range(trials))
    assert _objectives(path) == _objectives(whole)
    model = Path("best") / "model" / "model.safetensors"
    assert (path / model).read_bytes() == (whole / model).read_bytes()
    return path, whole


def _by_trial(file: Path, *more: str, without: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the lines of a search's file by trial and the keys in `more`, without what the clock has measured."""
    left_out = without.split()
    return {
        tuple(line[key] for key in ("trial", *more)): {key: line[key] for key in line if key not in left_out}
        for line in read_lines(file)
    }


def _copies(path: Path) -> tuple[int, int]:
    """Return the number of states that trials have taken over from others, and their bytes."""
    result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    return result["copies"], result["copied_bytes"]


def _objectives(path: Path) -> dict[int, float]:
    """Return the objective of each trial of a search."""
    return {line["trial"]: line["objective"] for line in read_lines(path / "trials.jsonl")}
