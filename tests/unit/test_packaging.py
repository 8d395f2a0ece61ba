"""The root folders become `orchestray.*`, and nothing shadows the standard library."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import orchestray
from orchestray.platform.config.yaml_text import read
from orchestray.trainers.config.load import dump_yaml, load_train_config
from support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("platform", "trainers", "search", "serving", "configs")
OWN = ("__init__.py", "py.typed", "cli", "dashboard", "loadtest", "moved.py")
"""Content of the import package itself."""
TRAIN_CONFIGS = sorted((ROOT / "configs" / "train").rglob("*.yaml"))


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_the_folder_platform_is_no_package() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_the_standard_librarys_platform_wins_even_with_the_root_on_the_path() -> None:
    assert Path(platform.__file__).parent == Path(os.__file__).parent
    found = python("import sys; sys.path.insert(0, '.'); import platform; print(platform.__file__)", ROOT)
    assert Path(found.stdout.strip()).parent == Path(os.__file__).parent


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_linked_relatively_into_the_import_package(room: str) -> None:
    link = ROOT / "src" / "orchestray" / room
    assert link.is_symlink()
    assert link.readlink() == Path(f"../../{room}")
    assert link.resolve() == ROOT / room


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "orchestray" / "py.typed").is_file()


def test_the_version_is_that_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert orchestray.__version__ == project["version"]


@pytest.mark.parametrize("room", ["trainers", "search", "serving"])
def test_a_room_refuses_to_be_imported_under_its_bare_name(room: str) -> None:
    assert python(f"import orchestray.{room}", ROOT).returncode == 0
    refused = python(f"import sys; sys.path.insert(0, '.'); import {room}", ROOT)
    assert f"ImportError: import orchestray.{room}, not {room}" in refused.stderr


def test_every_folder_of_modules_reaches_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    for target in ("wheel", "sdist"):
        assert {*ROOMS, *(f"src/orchestray/{name}" for name in OWN)} <= set(settings[target]["only-include"])
    assert settings["wheel"]["sources"] == {
        "src/orchestray": "orchestray",
        **{room: f"orchestray/{room}" for room in ROOMS},
    }


def test_no_shipped_train_config_is_forgotten() -> None:
    assert len(TRAIN_CONFIGS) == 95
    assert len(list((ROOT / "configs" / "train").rglob("*.y*ml"))) == len(TRAIN_CONFIGS)


def is_taught(file: Path) -> bool:
    """Return True if it learns from another run, which has to be trained first: a fresh machine has none."""
    return "distill" in read(file.read_text())


@pytest.mark.parametrize("file", list(filter(is_taught, TRAIN_CONFIGS)), ids=lambda file: str(file.stem))
def test_a_shipped_config_that_learns_from_another_run_says_which_command_trains_that(file: Path) -> None:
    config = load_train_config(file, look_at_task=False)
    assert config.distill is not None
    teacher = Path(config.distill.teacher)
    assert teacher.parent == ROOT / "runs"
    command = f"orchestray train configs/train/{teacher.name}.yaml"
    assert (ROOT / command.rsplit(maxsplit=1)[-1]).is_file()
    assert f"`{command}`" in " ".join(file.read_text().replace("\n#", " ").split())


@pytest.mark.parametrize("file", TRAIN_CONFIGS, ids=lambda file: str(file.stem))
def test_a_shipped_config_validates_and_begins_with_the_command_that_runs_it(file: Path) -> None:
    overrides = ["distill=null"] if is_taught(file) else []
    config = load_train_config(file, overrides)
    assert file.read_text().splitlines()[0] == f"# orchestray train {file.relative_to(ROOT)}"
    assert config.name == file.stem
    assert load_train_config(read(dump_yaml(config))) == config


def test_the_table_of_the_parquet_config_is_there_and_has_its_label() -> None:
    from pyarrow import parquet

    arguments = load_train_config(ROOT / "configs" / "train" / "parquet.yaml").task.arguments
    schema = parquet.read_schema(arguments["path"])
    assert arguments["label"] in schema.names


def test_every_public_name_is_found_where_it_lives() -> None:
    assert {name for name in orchestray.__all__ if getattr(orchestray, name) is None} == set()
    assert set(orchestray.__all__) == {*orchestray._HOMES, "__version__"}


def test_one_version_stands_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = read((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2].splitlines()[0]
    assert {project["version"], citation["version"], newest} == {orchestray.__version__}
    assert citation["license"] == project["license"]
