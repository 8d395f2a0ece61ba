"""Packages in memory stay out of sight until they are imported, and are not run again then."""

from __future__ import annotations

import importlib
import importlib.resources
import sys
import threading
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

import pytest

from orchestray.platform.cluster.late_modules import LateModules
from support.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write two packages that refuse to be run twice."""
    for name in ("late_one", "late_two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "import builtins\nassert not getattr(builtins, __name__ + '_ran', 0)\n"
            "setattr(builtins, __name__ + '_ran', 1)\n"
        )
        (tmp_path / name / "part.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    import builtins

    for name in ("late_one", "late_two"):
        for module in (name, f"{name}.part"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.delattr(builtins, f"{name}_ran", raising=False)


def shown() -> set[str]:
    return {name for name in sys.modules if name.startswith("late_")}


def test_the_first_import_brings_all_back_as_they_were_and_tells_once_before_any_is_seen() -> None:
    parts = [importlib.import_module(f"{name}.part") for name in ("late_one", "late_two")]
    packages = [sys.modules[name] for name in ("late_one", "late_two")]
    told: list[tuple[set[str], set[str]]] = []
    LateModules(["late_one", "late_two", "late_nowhere"], lambda modules: told.append((set(modules), shown())))
    assert shown() == set()
    assert told == []
    assert importlib.import_module("late_two.part") is parts[1]
    assert importlib.import_module("late_one") is packages[0]
    assert [sys.modules["late_one"], sys.modules["late_two"]] == packages
    assert told == [({"late_one", "late_one.part", "late_two", "late_two.part"}, set())]
    assert shown() == told[0][0]
    assert (importlib.resources.files("late_one") / "part.py").read_text() == "VALUE = 3\n"


def test_threads_that_import_at_once_are_given_the_same_module_and_none_runs_it_again() -> None:
    package = importlib.import_module("late_one")
    LateModules(["late_one"], lambda modules: None)
    given, start = [], threading.Barrier(8)

    def load() -> None:
        start.wait()
        given.append(importlib.import_module("late_one"))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(given) == 8
    assert all(module is package for module in given)


def test_a_package_imported_while_another_brings_it_back_comes_when_both_are_ready() -> None:
    """Hold the lock of a module in the first thread, on which the other must not wait."""
    one, two = [importlib.import_module(name) for name in ("late_one", "late_two")]
    is_locked, given, ready = threading.Event(), list[ModuleType](), list[int]()

    class Locked(MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "late_two":
                is_locked.set()  # a finder is asked under the lock of the module

    def come(modules: Mapping[str, ModuleType]) -> None:
        other.start()
        assert is_locked.wait(timeout=PATIENCE_S)
        assert [modules["late_one"], modules["late_two"]] == [one, two]
        ready.append(len(given))

    other = threading.Thread(target=lambda: given.append(importlib.import_module("late_two")), daemon=True)
    LateModules(["late_one", "late_two"], come)
    sys.meta_path.insert(0, Locked())
    first = threading.Thread(target=importlib.import_module, args=["late_one"], daemon=True)
    first.start()
    first.join(timeout=PATIENCE_S)
    assert not first.is_alive()
    other.join(timeout=PATIENCE_S)
    assert (ready, given) == ([0], [two])
