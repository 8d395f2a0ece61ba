"""The way from a config's `train.optimizer` section to the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestray.platform.task import TaskSource, load_class
from orchestray.trainers.optim.registry import OPTIMIZERS

if TYPE_CHECKING:
    from orchestray.trainers.optim.optimizers import Optimizer


def measures_layers(section: Mapping[str, Any]) -> bool:
    """Return True if the optimizer of a section watches layers while they compute; it is not made."""
    return bool(section) and ":" not in section["type"] and bool(OPTIMIZERS.find(section["type"]).measures)


def make_optimizer(
    type: str,  # noqa: A002 - the config's key
    *,
    file: str | None = None,
    source: str | None = None,
    modules: Mapping[str, str] | None = None,
    groups: Sequence[Mapping[str, Any]] = (),
    **arguments: Any,
) -> Optimizer:
    """Create the optimizer of a `train.optimizer` section from its keys.

    Args:
        type: name of an optimizer, "module:Class", or "path/to/file.py:Class".
        file: absolute path of the class's file, if it is in one.
        source: text of that file.
        modules: texts of the modules beside it.
        groups: parameters for which some keys have other values.
        arguments: the other keys; a named optimizer is made without `lr`, since `step` receives it.
    """
    if groups and measures_layers({"type": type}):  # its layers are inverted whole, whichever groups they are in
        lr = float(arguments["lr"])
        arguments["groups"] = [{**group, "rate": float(group.get("lr", lr)) / lr} for group in groups]
    elif groups:
        from orchestray.trainers.optim.grouped_optimizer import make_groups

        return make_groups(
            partial(make_optimizer, type, file=file, source=source, modules=modules), groups, **arguments
        )
    if ":" in type:
        from orchestray.trainers.optim.class_optimizer import ClassOptimizer

        found = load_class(TaskSource(type, {}, file, source, dict(modules or {})), key="train.optimizer.type")
        return ClassOptimizer(found, arguments)
    arguments.pop("lr", None)
    made: Optimizer = OPTIMIZERS.find(type)(**arguments)
    return made
