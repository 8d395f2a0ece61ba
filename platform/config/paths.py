"""Paths in configs: relative ones start at the config's file, those of the command line at the working directory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from orchestray.platform.usercode.class_names import name_of_class

KNOWN_SCHEMES = frozenset({"abfs", "abfss", "file", "gcs", "gs", "hdfs", "s3", "viewfs"})
"""Schemes of the file systems that pyarrow.fs opens from a URI."""

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


def is_file_type(task_type: str) -> bool:
    """Return True if a task's type names a class in a file, as opposed to a module or a built-in task."""
    place, colon, _ = task_type.rpartition(":")
    return bool(colon) and (place.endswith(".py") or "/" in place)


def scheme_of(place: str) -> str | None:
    """Return the scheme of a URI, or None for a plain path."""
    found = _SCHEME.match(place)
    return found.group(1) if found else None


def absolute(place: str, base: str) -> str:
    """Return a path made absolute, with `~` expanded; return a URI unchanged."""
    if scheme_of(place) is not None:
        return place
    return os.path.abspath(os.path.join(base, os.path.expanduser(place)))  # noqa: PTH100, PTH111, PTH118 - lexical


def resolve(data: dict[str, Any], base: str) -> None:
    """Make every path in a config's plain data absolute, and replace classes by their names, in place.

    Paths are `checkpoint.storage`, `distill.teacher`, `train.init_from`, the files of `task.type`,
    `train.optimizer.type`, `train.lr_schedule.type`, `strategy.exchange.outer_optimizer.type` and `trackers`, and the
    task's text arguments named `path` or `..._path`; with the task `huggingface` its `model` and `tokenizer` too.
    Values of another form are left alone: the schema reports them.

    Raises:
        ConfigError: a class is given that no other process can find.
    """
    for way in (("task",), *_CLASSES):
        section = _at(data, way)
        if isinstance(section, dict) and isinstance(section.get("type"), type):
            section["type"] = name_of_class(section["type"], f"{'.'.join(way)}.type")
    resolve_classes(data, "trackers", base)
    for section, key in _path_keys(data):
        value = section[key]
        if key == "type":
            place, _, class_name = value.rpartition(":")
            section[key] = f"{absolute(place, base)}:{class_name}"
        else:
            section[key] = absolute(value, base)


_CLASSES = (("train", "optimizer"), ("train", "lr_schedule"), ("strategy", "exchange", "outer_optimizer"))
"""Sections whose `type` may be a user's class."""


def _path_keys(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    named = (("checkpoint", "storage"), ("distill", "teacher"), ("train", "init_from"))
    for section, key in ((data.get(name), key) for name, key in named):
        if isinstance(section, dict) and isinstance(section.get(key), str) and section[key]:
            yield section, key
    task = data.get("task")
    if isinstance(task, dict):
        for key, value in task.items():
            is_path = key == "path" or str(key).endswith("_path")
            is_path |= task.get("type") == "huggingface" and key in {"model", "tokenizer"}
            if isinstance(value, str) and value and (is_path or (key == "type" and is_file_type(value))):
                yield task, key
    for way in _CLASSES:
        found = _at(data, way)
        if isinstance(found, dict) and isinstance(found.get("type"), str) and is_file_type(found["type"]):
            yield found, "type"


def resolve_classes(data: dict[str, Any], key: str, base: str) -> None:
    """Make the files of a list of classes absolute, and replace classes by their names, in place.

    Args:
        data: plain data of a config.
        key: key of the list; an item may be a mapping, which has its class as `type`.
        base: directory that relative paths start from.
    """
    items: Any = data.get(key)
    for index, item in enumerate(items if isinstance(items, list) else ()):
        at, where = (item, "type") if isinstance(item, dict) else (items, index)
        value: Any = at.get(where) if isinstance(item, dict) else item
        if isinstance(value, type):
            at[where] = name_of_class(value, key)
        elif isinstance(value, str) and is_file_type(value):
            place, _, class_name = value.rpartition(":")
            at[where] = f"{absolute(place, base)}:{class_name}"


def _at(data: Any, way: tuple[str, ...]) -> Any:
    """Return the value at the end of some keys; None if it is missing."""
    for step in way:
        data = data.get(step) if isinstance(data, dict) else None
    return data
