"""Benchmarks that train apart from timing keep each training, and use none that had other settings."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield the module as a benchmark finds it: the folder of benchmarks is on the path."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("harness.recorded")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "harness":
            del sys.modules[name]


def test_what_is_kept_is_not_trained_again_and_an_end_in_between_loses_nothing(
    recorded: ModuleType, tmp_path: Path
) -> None:
    path, trained = tmp_path / "kept.json", []

    def train(cell: str) -> list[str]:
        if cell == "broken":
            raise OSError(cell)
        trained.append(cell)
        return [cell.upper()]

    with pytest.raises(OSError, match="broken"):
        recorded.trained(path, {"seeds": (1, 2)}, ["a", "broken", "b"], train)
    assert recorded.trained(path, {"seeds": (1, 2)}, ["a", "b"], train) == {"a": ["A"], "b": ["B"]}
    assert trained == ["a", "b"]
    recorded.trained(path, {"seeds": (1, 3)}, ["a"], train)
    assert trained == ["a", "b", "a"]
    recorded.trained(None, {"seeds": (1, 3)}, ["a"], train)
    assert trained == ["a", "b", "a", "a"]
