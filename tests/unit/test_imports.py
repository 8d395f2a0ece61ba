"""Imports point one way, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
BELOW = {
    "platform": {"platform"},
    "trainers": {"platform", "trainers"},
    "search": {"platform", "trainers", "search"},
    "serving": {"platform", "trainers", "serving"},
}
"""For each room the rooms its modules may import: platform <- trainers <- search, serving."""

HEAVY = ("torch", "ray", "sklearn", "pandas", "tensorboard", "tensorboardX", "fastapi", "pyarrow")


def imported_modules(source: str) -> Iterator[str]:
    """Every module that a source text imports by statement, anywhere in it; imports by string are late ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "orchestray":
            yield f"orchestray.{node.attr}"  # the facade loads what it is asked for


def upward_imports(room: str, source: str) -> list[str]:
    """What a module of `room` imports from rooms that stand above it, or from the facade above all of them."""
    found = []
    for module in imported_modules(source):
        package, _, rest = module.partition(".")
        inner = rest.partition(".")[0]
        if package == "orchestray" and not (inner in BELOW[room] or inner.startswith("__") or not inner):
            found.append(module)
        if package in {"trainers", "search", "serving"} or (package == "platform" and inner in PLATFORM_MODULES):
            found.append(module)
    return found


PLATFORM_MODULES = {entry.stem for entry in (ROOT / "platform").iterdir()}
FILES = [
    pytest.param(room, file, id=str(file.relative_to(ROOT)))
    for room in BELOW
    for file in sorted((ROOT / room).rglob("*.py"))
]


@pytest.mark.parametrize(("room", "file"), FILES)
def test_a_module_imports_its_own_room_and_those_below_it_only(room: str, file: Path) -> None:
    assert upward_imports(room, file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("room", "source", "upward"),
    [
        ("platform", "import orchestray.trainers.replica.replica", ["orchestray.trainers.replica.replica"]),
        ("platform", "def f():\n    from orchestray.search import space", ["orchestray.search.space"]),
        ("platform", "from orchestray import trainers", ["orchestray.trainers"]),
        ("trainers", "if x:\n    from orchestray.serving import batcher", ["orchestray.serving.batcher"]),
        ("search", "from orchestray.serving import batcher", ["orchestray.serving.batcher"]),
        ("trainers", "from orchestray import train", ["orchestray.train"]),
        ("trainers", "import orchestray\norchestray.train()", ["orchestray.train"]),
        ("trainers", "import orchestray\norchestray.__file__", []),
        ("trainers", "import trainers.replica", ["trainers.replica"]),
        ("trainers", "from platform.config import schema", ["platform.config.schema"]),
        ("trainers", "import platform\nfrom orchestray.platform import errors", []),
        ("serving", "from orchestray.trainers import weights", []),
        ("platform", "importlib.import_module('orchestray.trainers.tasks')", []),
    ],
)
def test_the_walk_tells_an_upward_import_from_one_that_may_be(room: str, source: str, upward: list[str]) -> None:
    assert upward_imports(room, source) == upward


def loaded_after(code: str) -> set[str]:
    """Which of the heavy modules a fresh interpreter has loaded after running `code`."""
    report = f"{code}\nimport sys\nprint('\\n' + ' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def run_cli(*arguments: str) -> str:
    """Code that runs the command line in place, and expects it to end well."""
    return (
        f"import sys\nsys.argv = ['orchestray', *{arguments!r}]\n"
        "from orchestray.platform.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import orchestray",
        "import orchestray.platform.errors",
        "import orchestray.platform.config.load, orchestray.platform.config.resume",
        run_cli("--help"),
        run_cli("train", "--help"),
        run_cli("validate", "configs/train/digits.yaml", "configs/train/parquet.yaml"),
        run_cli("validate", "--schema", "train"),
    ],
    ids=["package", "errors", "config", "help", "train-help", "validate", "schema"],
)
def test_nothing_heavy_is_loaded_before_the_work_begins(code: str) -> None:
    assert loaded_after(code) == set()


def test_what_a_search_writes_of_its_trials_needs_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "from orchestray.search.records.lines import TrialLine\n"
        "from orchestray.search.records.writer import SearchRecords\n"
        f"with SearchRecords.create({str(tmp_path)!r}, 'a') as records:\n"
        "    records.report(0, 5, {'accuracy': 0.5})\n"
        "    records.finished(TrialLine(0, 'succeeded', 0.5, {'train.optimizer.lr': 0.1}))"
    )
    assert loaded_after(code) == set()
    assert any((tmp_path / "a" / "tensorboard").rglob("events*"))


@pytest.mark.parametrize("module", ["orchestray.search.engine.run", "orchestray.serving.deployments.ray_replicas"])
def test_what_connects_to_a_cluster_comes_without_ray_which_looks_for_its_token_when_it_is_imported(
    module: str,
) -> None:
    program = f"import sys, {module}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
