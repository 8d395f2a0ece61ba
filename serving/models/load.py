"""Loading of a model that answers batches from a run directory. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from orchestray.platform.errors import CheckpointError, OrchestrayError, TaskError
from orchestray.serving.config.own_class import class_name, names_class
from orchestray.serving.models.content import check_content, served_directory, served_name
from orchestray.serving.models.device import chosen_device
from orchestray.serving.models.own_class import OwnModel, load_own_model
from orchestray.serving.models.padding import Padding, padded_sizes
from orchestray.serving.models.quantize import quantize_int8
from orchestray.serving.models.served import ServedModel
from orchestray.serving.models.signature import with_interface
from orchestray.trainers.saved.interface import saved_interface
from orchestray.trainers.saved.run import load_run


def load_served_model(
    run: str | os.PathLike[str],
    *,
    name: str | None = None,
    version: str = "1",
    gpus: float = 0,
    precision: str = "float32",
    compile: bool = False,  # noqa: A002 - as torch calls it
    graphs: bool | None = None,
    pad_to: Sequence[int] | None = None,
    quantize: str | None = None,
    pad_to_multiple: int | None = None,
    max_batch_size: int = 32,
    num_threads: int = 1,
    content: str = "",
    arguments: Mapping[str, Any] | None = None,
) -> ServedModel | OwnModel:
    """Load the trained model of a run, or a class of the user's own, and warm it up.

    Args:
        run: directory of a training run, possibly of an ensemble, or of a search, whose best run is then loaded; or
            `path/to/file.py:Class`, see `OwnModel`.
        name: name in requests; default: the run's.
        version: version in requests.
        gpus: 0: on the CPU.
        precision: `float32` or `bfloat16`.
        compile: True to use torch.compile; batches are then padded to a few sizes.
        graphs: True to launch padded batches as CUDA graphs on a GPU; None: as `compile`.
        pad_to: sizes of padded batches; None: powers of two. The largest batch is one of them.
        quantize: `int8`: linear layers with weights of 8-bit integers, see `quantize_int8`.
        pad_to_multiple: number that divides the size of every batch, smaller ones being padded; None: none has to.
        max_batch_size: largest batch of the warm-up.
        num_threads: CPU threads of a call.
        content: result of `content_of` for the run when the version started; empty: not checked.
        arguments: arguments of a class.

    Raises:
        RunNameError: the run does not exist.
        CheckpointError: its trained model is missing, damaged, replaced by now, or does not answer.
        TaskError: its task cannot be imported any more.
        ConfigError: a GPU is asked for and none exists.
    """
    if names_class(str(run)):
        text = str(run)
        return load_own_model(
            text,
            arguments or {},
            name=name or class_name(text),
            version=version,
            num_threads=num_threads,
            content=content,
        )
    device = chosen_device(gpus)
    directory = served_directory(run)
    found = load_run(directory)
    pads = compile or device.type == "cuda" or pad_to_multiple is not None
    try:
        check_content(directory / "model", content)
        trained = found.load_model()
        check_content(directory / "model", content)  # it may be written while it is read
        interface = saved_interface(directory / "model", found.load_task)
        lengths = (interface.padding, interface.padding_mask, interface.max_length)
        padding = Padding(*lengths) if interface.padding else None
        served = ServedModel(
            quantize_int8(trained) if quantize == "int8" else trained,
            interface.example,
            name=name or served_name(run),
            version=version,
            device=device,
            precision=precision,
            compile=compile,
            graphs=compile if graphs is None else graphs,
            pad_to=padded_sizes(max_batch_size, pad_to_multiple or 1, pad_to) if pads else (),
            num_threads=num_threads,
            padding=padding,
        )
        served.signature = with_interface(served.signature, interface)
        served.warm_up(max_batch_size)
    except (CheckpointError, TaskError) as error:
        raise type(error)(f"{run} cannot be served: {error}") from error
    except OrchestrayError:
        raise
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"{run} cannot be served: the memory of {device} does not hold its model beside what is there. If that is "
            "the version before, set update.free_first to true; else lower batching.max_batch_size, or the number of "
            "sizes in compute.pad_to"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{run} cannot be served: its model does not answer its example: {type(error).__name__}: {error}"
        ) from error
    return served
