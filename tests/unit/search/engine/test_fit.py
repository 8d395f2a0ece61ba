"""The variables that a search sets for Tune, and the names of its experiments."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from orchestray.search.engine.fit import _ENVIRONMENT, _environment, _next_name

OWN = "TUNE_MAX_PENDING_TRIALS_PG"


def test_variables_are_set_while_any_search_runs_and_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(OWN, "3")
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(_environment())
    second.enter_context(_environment())
    assert {name: os.environ[name] for name in _ENVIRONMENT} == {**_ENVIRONMENT, OWN: "3"}
    first.close()
    assert {name: os.environ[name] for name in _ENVIRONMENT} == {**_ENVIRONMENT, OWN: "3"}
    second.close()
    assert {name: os.environ.get(name) for name in _ENVIRONMENT} == {**dict.fromkeys(_ENVIRONMENT), OWN: "3"}


def test_each_attempt_at_a_search_is_an_experiment_of_its_own(tmp_path: Path) -> None:
    assert _next_name(tmp_path / "none") == "1"
    for name in ("1", "2", "10", "basic-variant-state.json"):
        (tmp_path / name).mkdir()
    assert _next_name(tmp_path) == "11"
