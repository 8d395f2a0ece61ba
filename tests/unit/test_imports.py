"""Imports point down, folder by folder, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.fresh import loaded_after
from support.layers import FILES, LEVELS, folder_of, upward_imports

HEAVY = ("torch", "ray", "sklearn", "pandas", "tensorboard", "tensorboardX", "fastapi", "pyarrow")


def test_every_folder_has_its_layer_and_every_layer_its_folders() -> None:
    assert {folder_of(module) for module in FILES} - LEVELS.keys() == set()
    assert LEVELS.keys() - {folder_of(module) for module in FILES} == set()


def test_a_folder_imports_folders_of_lower_layers_only() -> None:
    found = {
        module: upward
        for module, file in FILES.items()
        if (upward := upward_imports(module, file.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("module", "source", "upward"),
    [
        ("platform.run.store", "import orchestray.trainers.loop.replica", ["orchestray.trainers.loop.replica"]),
        ("platform.run.store", "def f():\n    from orchestray.search import spaces", ["orchestray.search.spaces"]),
        ("platform.run.store", "from orchestray import trainers", ["orchestray.trainers"]),
        ("platform.run.store", "load('orchestray.trainers.tasks')", ["orchestray.trainers.tasks"]),
        ("platform.run.store", "load('orchestray.trainers.tasks.digits:Digits')", ["orchestray.trainers.tasks.digits"]),
        ("platform.run.store", "import orchestray.platform.jobs.submit", ["orchestray.platform.jobs.submit"]),
        ("platform.run.store", "import orchestray.platform.run.files", []),
        ("trainers.core.forward", "from orchestray.trainers.loop import replica", ["orchestray.trainers.loop.replica"]),
        ("trainers.loop.replica", "from orchestray.trainers.core import forward", []),
        ("trainers.loop.replica", "if x:\n    from orchestray.serving import api", ["orchestray.serving.api"]),
        ("trainers.loop.replica", "if TYPE_CHECKING:\n    from orchestray.serving import api", []),
        ("search.engine.run", "from orchestray.serving import batching", ["orchestray.serving.batching"]),
        ("serving.api", "from orchestray.search import methods", ["orchestray.search.methods"]),
        ("trainers.loop.replica", "from orchestray import train", ["orchestray.train"]),
        ("trainers.loop.replica", "import orchestray\norchestray.train()", ["orchestray.train"]),
        ("trainers.loop.replica", "import orchestray\norchestray.__file__", []),
        ("trainers.loop.replica", "import trainers.loop", ["trainers.loop"]),
        ("trainers.loop.replica", "from platform.config import base", ["platform.config.base"]),
        ("trainers.loop.replica", "import platform\nfrom orchestray.platform import errors", []),
    ],
)
def test_the_walk_tells_an_upward_import_from_one_that_may_be(module: str, source: str, upward: list[str]) -> None:
    assert upward_imports(module, source) == upward


def run_cli(*arguments: str) -> str:
    """Return code that runs the command line in place, and expects it to end well."""
    return (
        f"import sys\nsys.argv = ['orchestray', *{arguments!r}]\n"
        "from orchestray.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )


BEFORE_THE_WORK = {
    "package": "import orchestray",
    "errors": "import orchestray.platform.errors",
    "config": "import orchestray.trainers.config.load, orchestray.trainers.config.resume",
    "profile": "import orchestray.trainers.machine.kept, orchestray.trainers.machine.calibrate",
    "source": (
        "from orchestray.platform.task import TaskSource\n"
        "from orchestray.trainers.tasks.params import TaskConfig\n"
        "TaskSource.from_json(TaskSource.from_config(TaskConfig(type='digits')).to_json())"
    ),
    "schedules": (
        "import orchestray.trainers.parallel.pipeline.simulation, orchestray.trainers.parallel.pipeline.schedules"
    ),
    "help": run_cli("--help"),
    "train-help": run_cli("train", "--help"),
    "validate": run_cli("validate", "configs/train/digits.yaml", "configs/train/parquet.yaml"),
    "schema": run_cli("validate", "--schema", "train"),
}


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    return loaded_after(BEFORE_THE_WORK)


@pytest.mark.parametrize("step", BEFORE_THE_WORK)
def test_nothing_heavy_is_loaded_before_the_work_begins(loaded: dict[str, set[str]], step: str) -> None:
    assert loaded[step] & {*HEAVY} == set()


def test_reading_configs_loads_no_event_loop(loaded: dict[str, set[str]]) -> None:
    assert loaded["validate"] & {"asyncio", "ssl"} == set()


def test_what_a_search_writes_of_its_trials_needs_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "from orchestray.search.results.schema import TrialLine\n"
        "from orchestray.search.results.writer import SearchRecords\n"
        f"with SearchRecords.create({str(tmp_path)!r}, 'a') as records:\n"
        "    records.report(0, 5, {'accuracy': 0.5})\n"
        "    records.finished(TrialLine(0, 'succeeded', 0.5, {'train.optimizer.lr': 0.1}))"
    )
    assert loaded_after({"records": code})["records"] & {*HEAVY} == set()
    assert any((tmp_path / "a" / "tensorboard").rglob("events*"))


@pytest.mark.parametrize("module", ["orchestray.search.engine.run", "orchestray.serving.application.build"])
def test_what_connects_to_a_cluster_comes_without_ray_which_looks_for_its_token_when_it_is_imported(
    module: str,
) -> None:
    program = f"import sys, {module}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
