"""The programs of trials by name; each is imported on demand."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from orchestray.platform.process import gc_control

PROGRAMS: Mapping[str, str] = {
    "training": "orchestray.search.trials.training:TrainingTrial",
    "gang": "orchestray.search.trials.gang:GangTrial",
    "packed": "orchestray.search.trials.packed:PackedPopulation",
    "enas": "orchestray.search.trials.one_shot.enas:EnasTrial",
    "darts": "orchestray.search.trials.one_shot.darts:DartsTrial",
    "smash": "orchestray.search.trials.one_shot.smash:SmashTrial",
}
"""Maps the name of a program to "module:Class"."""

_OLD_NAMES: Mapping[str, str] = {
    "orchestray.search.trials.packed:PackedPopulation": "packed",
    "orchestray.search.trials.one_shot.enas:EnasTrial": "enas",
    "orchestray.search.trials.one_shot.darts:DartsTrial": "darts",
    "orchestray.search.trials.one_shot.smash:SmashTrial": "smash",
}
"""Maps the name of a program in journals of version 0.1 to its current name."""


def program_name(name: str | None) -> str | None:
    """Return the current name of a program in a journal of this version or of 0.1."""
    return None if name is None else _OLD_NAMES.get(name, name)


def find_program(name: str) -> Any:
    """Return the class of a program.

    Args:
        name: a key of `PROGRAMS`, or "module:Class" of any other program.
    """
    module, _, class_name = PROGRAMS.get(name, name).partition(":")
    with gc_control.pause():
        return getattr(import_module(module), class_name)
