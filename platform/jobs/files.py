"""The files a command needs on another machine, gathered in one directory that keeps their relative locations.

These are the configs that a command names, and the files they refer to by a relative path. A user's task file comes
with the modules beside it that it imports. Absolute paths and URIs of data are taken to be valid on the cluster, and
stay as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestray.platform.config import yaml_text
from orchestray.platform.config.overrides import value_of
from orchestray.platform.config.paths import is_file_type, scheme_of
from orchestray.platform.errors import ConfigError, TaskError
from orchestray.platform.usercode.beside import Texts, find_code

MAX_BYTES = 100 * 1024 * 1024
"""Largest total size sent with a job, in bytes: Ray keeps the files in the memory of the head node."""

_YAML = (".yaml", ".yml")
_OF_RAY = (".gitignore", ".rayignore")
"""Files by which Ray would leave out others of their folder."""
_PLACES = (("train", "init_from"), ("distill", "teacher"))
"""Keys of places that are named otherwise than paths."""
_MAYBE_PLACES = (("task", "model"), ("task", "tokenizer"))
"""Keys of places, or of names that are not places."""


@dataclass
class JobFiles:
    """The files to send: their absolute paths here, and the new texts of files that are changed on the way."""

    paths: set[Path] = field(default_factory=set)
    changed: dict[Path, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """Nearest directory that contains every file."""
        return Path(os.path.commonpath([file.parent for file in self.paths]))

    def add_config(self, file: Path, label: str) -> None:
        """Add a config and everything it refers to; `label` is the user's name for it."""
        file = _absolute(file, Path.cwd())
        if file in self.paths:
            return
        self.paths.add(file)
        try:
            data = yaml_text.read(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return  # the command itself reports what is wrong with it
        absolute_code = False
        for keys, value in _texts(data):
            place = self._add_reference(keys, value, file.parent, label)
            absolute_code |= place is not None and _is_anchored(value)
        if absolute_code:
            self.changed[file] = yaml_text.write(_with_relative_code(data, file.parent))

    def add_override(self, override: str) -> Path | None:
        """Add what a `key.path=value` refers to, and return its path; None if it does not refer to a local file."""
        path, _, text = override.partition("=")
        try:
            value = value_of(text)
        except ValueError:
            return None
        if not isinstance(value, str) or not value:
            return None
        return self._add_reference(tuple(path.split(".")), value, Path.cwd(), path)

    def check(self) -> None:
        """Raise an error if the files cannot be sent.

        Raises:
            ConfigError: lists every problem.
        """
        num_bytes = sum(file.stat().st_size for file in self.paths if file.is_file())
        if not self.problems and num_bytes > MAX_BYTES:
            largest = max(self.paths, key=lambda file: file.stat().st_size)
            self.problems.append(
                f"The files to send have {num_bytes / 1e6:.0f} MB, at most {MAX_BYTES / 1e6:.0f} MB go with a job "
                f"(the largest is {largest}). Put the data where every node of the cluster can read it, "
                "and give that place: an absolute path, or a URI such as s3://bucket/data."
            )
        if self.problems:
            raise ConfigError(self.problems)

    def copy_to(self, directory: Path) -> None:
        """Copy everything to `directory`, each file at its path relative to `root`."""
        for file in sorted(self.paths):
            target = directory / file.relative_to(self.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            if file in self.changed:
                target.write_text(self.changed[file], encoding="utf-8")
            else:
                shutil.copyfile(file, target)

    def _add_reference(self, keys: tuple[str, ...], value: str, base: Path, label: str) -> Path | None:
        """Add what one value refers to, and return its local path; None if it does not refer to a local file."""
        if is_file_type(value):
            file = _absolute(value.rpartition(":")[0], base)
            if not file.is_file():
                return None
            self._add_code(file)
            return file
        if scheme_of(value) is not None or _is_anchored(value):
            return None
        place = _absolute(value, base)
        if value.endswith(_YAML) and place.is_file():
            self.add_config(place, f"{label}: {'.'.join(keys)}")
            return place
        if keys[-2:] == ("checkpoint", "storage"):
            self.problems.append(
                f"{label}: {'.'.join(keys)}: {value!r} would be inside the job's own files, which the cluster deletes. "
                "Give an absolute path that every node can write, or a URI such as s3://bucket/checkpoints."
            )
        elif _is_place(keys) or (keys[-2:] in _MAYBE_PLACES and place.exists()):
            return self._add_data(place, value, f"{label}: {'.'.join(keys)}")
        return None

    def _add_data(self, place: Path, value: str, label: str) -> Path | None:
        if place.is_file():
            self.paths.add(place)
        elif place.is_dir():
            self.paths.update(_files_in(place))
        else:
            self.problems.append(
                f"{label}: there is no {value} here to send along. "
                "Data that is on the cluster is named by its absolute path there, or by a URI."
            )
            return None
        return place

    def _add_code(self, file: Path) -> None:
        """Add a Python file, the modules beside it that it imports, and what else lies in packages among them."""
        self.paths.add(file)
        try:
            beside = find_code(file, file.read_text(encoding="utf-8"), Texts()).beside
        except (OSError, ValueError, TaskError):
            return  # the command itself reports what is wrong with it
        for path in map(Path, beside):
            self.paths.add(path)
            if path.name == "__init__.py":
                self.paths.update(_files_in(path.parent))


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, and of folders that it links to; of a run all but its checkpoints."""
    seen = set[str]()
    for root, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(root)) in seen:  # a link back
            folders.clear()
            continue
        seen.add(real)
        not_sent = {"__pycache__"}
        if root == str(folder) and "model" in folders and "config.yaml" in names:
            not_sent.add("checkpoints")
        folders[:] = [name for name in folders if name not in not_sent]
        yield from (file for name in names if name not in _OF_RAY and (file := Path(root) / name).is_file())


def copy_package(directory: Path) -> Path:
    """Copy the source of this package to `directory`/orchestray, following links, and return that path."""
    import orchestray

    source = Path(orchestray.__file__).parent
    return Path(
        shutil.copytree(
            source, directory / "orchestray", ignore=shutil.ignore_patterns("__pycache__", "*.py[co]", ".*")
        )
    )


def _absolute(place: str | Path, base: Path) -> Path:
    # Lexical, as the configs' own paths are: links keep the names that the user gave them.
    return Path(os.path.abspath(base / Path(place).expanduser()))  # noqa: PTH100


def _is_place(keys: tuple[str, ...]) -> bool:
    return keys[-1] == "path" or keys[-1].endswith("_path") or keys[-2:] in _PLACES


def _is_anchored(value: str) -> bool:
    return value.startswith(("/", "~"))


def _texts(data: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every text in plain data, with the keys that lead to it."""
    if isinstance(data, str) and keys and data:
        yield keys, data
    elif isinstance(data, dict | list):
        items: Sequence[tuple[Any, Any]] = list(data.items() if isinstance(data, dict) else enumerate(data))
        for key, value in items:
            yield from _texts(value, (*keys, *str(key).split(".")))


def _with_relative_code(data: Any, base: Path) -> Any:
    """Return the data with absolute `file.py:Class` texts made relative to `base`, if the files exist here."""
    if isinstance(data, dict):
        return {key: _with_relative_code(value, base) for key, value in data.items()}
    if isinstance(data, list):
        return [_with_relative_code(value, base) for value in data]
    if isinstance(data, str) and is_file_type(data) and _is_anchored(data):
        place, _, name = data.rpartition(":")
        file = _absolute(place, base)
        if file.is_file():
            return f"{os.path.relpath(file, base)}:{name}"
    return data
