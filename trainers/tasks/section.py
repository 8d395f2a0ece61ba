"""The section `task`: a union of the built-in tasks and a class for any task of a user."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Discriminator, Tag

from orchestray.trainers.tasks.params import TaskConfig
from orchestray.trainers.tasks.registry import TASKS

OWN = "own"
"""The tag of a task that is not built in."""


def _tag(value: object) -> str | None:
    """Return the tag of the union's member that a value belongs to."""
    name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return name if isinstance(name, str) and name in TASKS else OWN


if TYPE_CHECKING:
    from orchestray.trainers.tasks.params import (
        DigitsTask,
        HuggingFaceTask,
        ImagesTask,
        MnistTask,
        ParquetTask,
        PythonSourceTask,
    )

    AnyTask = DigitsTask | PythonSourceTask | ImagesTask | MnistTask | ParquetTask | HuggingFaceTask | TaskConfig
else:
    _TAGGED = [Annotated[TASKS.params(name), Tag(name)] for name in TASKS]
    AnyTask = Annotated[reduce(or_, [*_TAGGED, Annotated[TaskConfig, Tag(OWN)]]), Discriminator(_tag)]
