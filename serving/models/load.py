"""Loading of a model that answers batches from a run directory. Imports torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from orchestray.platform.errors import CheckpointError, OrchestrayError, RunNameError, TaskError
from orchestray.platform.run.model_files import load_model_json
from orchestray.serving.models.device import chosen_device
from orchestray.serving.models.padding import padded_sizes
from orchestray.serving.models.quantize import quantize_int8
from orchestray.serving.models.served import ServedModel
from orchestray.trainers.saved.interface import saved_example
from orchestray.trainers.saved.run import load_run


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
    """Load the trained model of a run, and warm it up.

    Args:
        run: directory of a training run, possibly of an ensemble, or of a search, whose best run is then loaded.
        name: name in requests; default: the run's.
        version: version in requests.
        gpus: 0: on the CPU.
        precision: `float32` or `bfloat16`.
        compile: True to use torch.compile; batches are then padded to a few sizes.
        quantize: `int8`: linear layers with weights of 8-bit integers, see `quantize_int8`.
        max_batch_size: largest batch of the warm-up.
        num_threads: CPU threads of a call.
        content: result of `content_of` for the run when the version started; empty: not checked.

    Raises:
        RunNameError: the run does not exist.
        CheckpointError: its trained model is missing, damaged, replaced by now, or does not answer.
        TaskError: its task cannot be imported any more.
        ConfigError: a GPU is asked for and none exists.
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
            saved_example(directory / "model", found.load_task),
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

    The model of a directory changes if the run is trained again, or a search finds a better one.
    """
    try:
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
        raise CheckpointError(
            f"{model_directory} was written anew since this version was started, and the other processes of the "
            "version have the model that was there before: take the new one over with "
            "`orchestray serve CONFIG --update`"
        )


def _described(model_directory: Path) -> str:
    return json.dumps(load_model_json(model_directory), sort_keys=True)


def served_name(run: str | os.PathLike[str]) -> str:
    """Return the name under which a run is served: its directory's, or the search's for its `best`."""
    path = Path(run).absolute()
    return path.parent.name if path.name == "best" and (path.parent / "trials.jsonl").is_file() else path.name
