"""The place and the identity of a served model: a run, or a class of the user's own. Does not import torch."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from orchestray.platform.errors import CheckpointError, OrchestrayError, RunNameError, TaskError
from orchestray.platform.run.model_files import load_model_json
from orchestray.platform.task import TaskSource
from orchestray.serving.config.own_class import names_class


def served_directory(run: str | os.PathLike[str]) -> Path:
    """Return the run directory; for a search that of its best run.

    Raises:
        RunNameError: there is none.
    """
    path = Path(run)
    if (path / "trials.jsonl").is_file():
        if not (path / "best" / "config.yaml").is_file():
            raise RunNameError(f"{path} is a search that has found no run yet: there is nothing to serve")
        return path / "best"
    return path


def content_of(run: str | os.PathLike[str]) -> str:
    """Return a text that identifies a run's trained model by a checksum of its weights; empty if there is none.

    The model of a directory changes if the run is trained again, or a search finds a better one; that of a class if
    its file does, or a module beside it.
    """
    try:
        if names_class(str(run)):
            return _digest(TaskSource.of_class(str(run), {}, noun="model"))
        return _described(served_directory(run) / "model")
    except OrchestrayError:
        return ""  # the loading of the model reports what is wrong


def check_content(model_directory: Path, content: str) -> None:
    """Refuse a model that differs from the one that the version started with: one version must not mix two models.

    Args:
        model_directory: the run's `model`.
        content: result of `content_of` for the run when the version started; empty: not checked.

    Raises:
        CheckpointError: the model has been replaced.
    """
    if content and _described(model_directory) != content:
        raise CheckpointError(_replaced(model_directory))


def check_source(source: TaskSource, content: str) -> None:
    """Refuse a class whose file, or a module beside it, has been edited, as `check_content` refuses a model.

    Args:
        source: the class, as it was read.
        content: result of `content_of` for it when the version started; empty: not checked.

    Raises:
        TaskError: it has been edited.
    """
    if content and _digest(source) != content:
        raise TaskError(_replaced(f"{source.file}, or a module beside it,"))


def _replaced(what: object) -> str:
    return (
        f"{what} was written anew since this version was started, and the other processes of the version have the "
        "model that was there before: take the new one over with `orchestray serve CONFIG --update`"
    )


def _described(model_directory: Path) -> str:
    return json.dumps(load_model_json(model_directory), sort_keys=True)


def served_name(run: str | os.PathLike[str]) -> str:
    """Return the name under which a run is served: its directory's, or the search's for its `best`."""
    path = Path(run).absolute()
    return path.parent.name if path.name == "best" and (path.parent / "trials.jsonl").is_file() else path.name


def _digest(source: TaskSource) -> str:
    """Return a digest of a class's file, and of the modules beside it that it imports."""
    return hashlib.sha256(json.dumps(source.texts, sort_keys=True).encode()).hexdigest()
