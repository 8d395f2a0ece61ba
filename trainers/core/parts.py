"""The classes that carry out a run, as found on its live objects. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

TRAINING = frozenset(
    f"trainers.{folder}"
    for folder in (
        *("aggregation", "compression", "distill", "ensemble", "few_bits", "optim", "parallel", "ps", "solvers"),
        *("survey", "sync", "tasks"),
    )
)
"""Folders with what a training config chooses between: schemes, optimizers, compressions, tasks, ..."""
_OURS = "orchestray."
_MOST_ITEMS = 1_000
"""Items of a container beyond which it is data, in which no parts are looked for."""


def parts_of(*objects: object, folders: Collection[str] = TRAINING) -> list[str]:
    """Return the classes and functions that carry out a run, sorted, as `room.folder.Class` without names of files.

    They are found from the given objects on, through attributes and containers. So they are what was made, and not what
    was asked for. Classes of torch.optim are parts, too.

    Args:
        objects: objects to begin with.
        folders: folders of the classes that are parts, as `room.folder`.
    """
    kinds = [one if isinstance(one, FunctionType) else type(one) for one in _live(objects, folders)]
    return sorted({name for kind in kinds if (name := _name_of(kind, folders)) is not None})


def reports_of(*objects: object, folders: Collection[str] = TRAINING) -> dict[str, list[dict[str, Any]]]:
    """Return what live objects say of their own work: by the name of their class, the `run_report` of each.

    An object that has nothing to say, because it did no work, is left out.

    Args:
        objects: objects to begin with.
        folders: same as in `parts_of`; they say which rooms are looked through.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for one in _live(objects, folders):
        report = getattr(type(one), "run_report", None)
        if isinstance(report, FunctionType) and type(one).__module__.startswith(_OURS) and (said := report(one)):
            found.setdefault(type(one).__name__, []).append(said)
    return {name: found[name] for name in sorted(found)}


def _live(objects: Iterable[object], folders: Collection[str]) -> Iterator[object]:
    """Yield the objects that hold each other, each once, from the given ones on."""
    rooms = tuple({f"{_OURS}{folder.split('.')[0]}." for folder in folders})
    seen: dict[int, object] = {}
    waiting = list(objects)
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # kept alive: another object could get its id
        yield one
        waiting += _inside(one, rooms)


def _name_of(kind: type | FunctionType, folders: Collection[str]) -> str | None:
    """Return the name of a class or function in a list of parts, that of its outer one; None for any other."""
    if kind.__module__.startswith("torch.optim."):
        return f"torch.optim.{kind.__qualname__}"
    if not kind.__module__.startswith(_OURS) or kind.__name__.startswith("_"):
        return None
    *path, module = kind.__module__.removeprefix(_OURS).split(".")
    is_part = ".".join(path[:2]) in folders and module != "params"
    return ".".join((*path, kind.__qualname__.split(".")[0])) if is_part else None


def _inside(one: object, rooms: tuple[str, ...]) -> Iterator[Any]:
    """Yield what an object holds, if it is a container, of one of the rooms, or a module of a model."""
    if isinstance(one, Mapping):
        yield from list(one.values()) if len(one) <= _MOST_ITEMS else ()  # other threads may be changing it
    elif isinstance(one, list | tuple | set | frozenset):
        yield from list(one) if len(one) <= _MOST_ITEMS else ()
    elif isinstance(one, partial | MethodType | FunctionType):
        yield from _around(one)
    elif not isinstance(one, type) and (type(one).__module__.startswith(rooms) or hasattr(one, "_modules")):
        yield from list(getattr(one, "__dict__", {}).values())
        for name in _slots(type(one)):
            yield getattr(one, name, None)


def _around(function: partial[Any] | MethodType | FunctionType) -> Iterator[Any]:
    """Yield what a function was made with."""
    if isinstance(function, partial):
        yield from (function.func, function.args, function.keywords)
    elif isinstance(function, MethodType):
        yield function.__self__
    else:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is not filled yet
                yield cell.cell_contents


def _slots(kind: type) -> Iterable[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
