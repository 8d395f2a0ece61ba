"""From a run directory to a model that answers batches. Imports torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.errors import CheckpointError, OrchestrayError, RunNameError, TaskError
from orchestray.platform.run.load import load_run
from orchestray.platform.run.model_files import load_model_json
from orchestray.serving.models.device import chosen_device
from orchestray.serving.models.padding import padded_sizes
from orchestray.serving.models.quantize import quantize_int8
from orchestray.serving.models.served import ServedModel

if TYPE_CHECKING:
    from orchestray.platform.task import Task


def load_served_model(
    run: str | os.PathLike[str],
    *,
    name: str | None = None,
    version: str = "1",
    gpus: float = 0,
    precision: str = "float32",
    compile: bool = False,  # noqa: A002 - as torch calls it
    quantize: str | None = None,
    max_batch_size: int = 32,
    num_threads: int = 1,
    content: str = "",
) -> ServedModel:
    """The trained model of a run, ready to answer: loaded, and warm.

    Args:
        run: directory of a training run, an ensemble's too, or of a search: then the best run it has found.
        name: what it is served as; default: the run's name.
        version: what it is served as.
        gpus: 0: on the CPU.
        precision: `float32` or `bfloat16`.
        compile: whether torch.compile is used; batches are then padded to few sizes.
        quantize: `int8`: linear layers with weights of 8-bit integers, see `quantize_int8`.
        max_batch_size: what it is warmed up to.
        num_threads: of the CPU.
        content: what `content_of` the run was when the version started; empty: whatever is there now.

    Raises:
        RunNameError: there is no run.
        CheckpointError: it has no trained model, or a damaged one, or one that does not answer, or another by now.
        TaskError: its task does not import any more.
        ConfigError: a GPU is asked for, and there is none.
    """
    device = chosen_device(gpus)
    directory = served_directory(run)
    found = load_run(directory)
    pads = compile or device.type == "cuda"
    try:
        check_content(directory / "model", content)
        trained = found.load_model()
        check_content(directory / "model", content)  # it may be written while it is read
        served = ServedModel(
            quantize_int8(trained) if quantize == "int8" else trained,
            example_of(found.load_task()),
            name=name or served_name(run),
            version=version,
            device=device,
            precision=precision,
            compile=compile,
            pad_to=padded_sizes(max_batch_size) if pads else (),
            num_threads=num_threads,
        )
        served.warm_up(max_batch_size)
    except (CheckpointError, TaskError) as error:
        raise type(error)(f"{run} cannot be served: {error}") from error
    except OrchestrayError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{run} cannot be served: its model does not answer its example: {type(error).__name__}: {error}"
        ) from error
    return served


def served_directory(run: str | os.PathLike[str]) -> Path:
    """The run directory: of a search, that of its best run.

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
    """Of a run's trained model the description, which has a checksum of the weights; empty where there is none.

    A run of the same directory may be trained anew, and a search find a better one.
    """
    try:
        return _described(served_directory(run) / "model")
    except OrchestrayError:
        return ""  # whoever loads it says what is wrong


def check_content(model_directory: Path, content: str) -> None:
    """Refuse a model that is not the one a version was started with: one version would answer with two models.

    Args:
        model_directory: the run's `model`.
        content: what `content_of` the run was; empty: whatever is there now.

    Raises:
        CheckpointError: it is another one.
    """
    if content and _described(model_directory) != content:
        raise CheckpointError(
            f"{model_directory} was written anew since this version was started, and the other processes of the "
            "version have the model that was there before: take the new one over with "
            "`orchestray serve CONFIG --update`"
        )


def _described(model_directory: Path) -> str:
    return json.dumps(load_model_json(model_directory), sort_keys=True)


def served_name(run: str | os.PathLike[str]) -> str:
    """The name that a run is served as: its directory's; of a search's `best` the search's."""
    path = Path(run).absolute()
    return path.parent.name if path.name == "best" and (path.parent / "trials.jsonl").is_file() else path.name


def example_of(task: Task) -> Tensor:
    """One sample's inputs, without the batch dimension: the task's own example, or the first row of its data.

    Raises:
        TaskError: it has neither.
    """
    own: Any = getattr(task, "example_inputs", None)  # an optional method of a task
    if own is not None:
        return torch.as_tensor(own())
    try:
        data = task.dataset("train")
        inputs = task.to_batch(data.take([0]))["inputs"]
    except Exception as error:
        raise TaskError(
            "the task has no example_inputs(), and its data cannot be read here "
            f"({type(error).__name__}: {error}): add example_inputs() to the task"
        ) from error
    return inputs[0]
