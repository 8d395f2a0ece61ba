"""`orchestray search --simulate` as a user types it: nothing is trained, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.cli import orchestray_here
from support.layers import ROOT

CONFIG = ROOT / "configs/search/digits-steady-state.yaml"


def test_a_simulation_says_how_busy_the_workers_are_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("search.parallel=10", "search.budget.trials=20", "search.budget.time_limit_s=null")
    done = orchestray_here("search", CONFIG, *sizes, "--simulate", "--spread", "0", "--trial-s", "1800", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measured = found.pop("method_ms")
    assert measured > 0
    assert found == {
        "method": "regularized_evolution",
        "workers": 10,
        "trials": 20,
        "ended": 20,
        "hours": pytest.approx(1.0),
        "utilisation": pytest.approx(1.0),
        "utilisation_until_last": pytest.approx(1.0),
        "trials_per_hour": pytest.approx(20.0),
    }
    assert list(tmp_path.iterdir()) == []
    shown = orchestray_here("search", CONFIG, *sizes, "--simulate", "--spread", "0")
    assert "busy, in all                          100.0%" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--simulate", "--resume"], "leave out --resume"),
        (["--spread", "0.1"], "--spread: only a simulation has that; add --simulate"),
    ],
)
def test_options_without_effect_are_refused(arguments: list[str], error: str) -> None:
    done = orchestray_here("search", CONFIG, *arguments)
    assert done.returncode != 0
    assert error in done.stderr


def test_a_method_whose_trials_are_programs_is_refused() -> None:
    done = orchestray_here("search", ROOT / "configs/search/digits-enas.yaml", "--simulate")
    assert done.returncode != 0
    assert "enas runs a program of its own" in done.stderr
