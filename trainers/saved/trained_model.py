"""The trained model of a run directory as a state: written, read, and put into a model that is built again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from orchestray.platform.run.model_files import (
    EXTRA_FILE,
    load_beside,
    load_model_json,
    load_model_tensors,
    save_model,
)
from orchestray.trainers.core.buffer_kinds import apply_kinds
from orchestray.trainers.core.model_state import ModelState, load_state
from orchestray.trainers.core.weight_norm import folded_for
from orchestray.trainers.core.weights import convert
from orchestray.trainers.saved.checkpoint_model import BUFFERS
from orchestray.trainers.saved.interface import INTERFACE, Interface

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import pyarrow as pa
    from torch import Tensor, nn

    from orchestray.platform.task import Task


def write_model(
    directory: str | os.PathLike[str],
    state: ModelState,
    model_json: Mapping[str, Any],
    task: Task,
    interface: Interface | Callable[[], pa.Table] | None = None,
    *,
    is_compressed: bool = False,
) -> None:
    """Write a trained model, with its interface and the files that its task wants beside it.

    Args:
        directory: folder to make.
        state: the plain model.
        model_json: result of `describe_model`; see `save_model`.
        task: the trained task. Its optional method `export_files(tensors)` returns contents of files by their names.
        interface: the interface of the model, or a function that returns the first row of the training data; default:
            the data is opened for it.
        is_compressed: True to write the tensors as `huffman_file` does.

    Raises:
        StorageError: the disk is full, or not writable.
    """
    buffers = {BUFFERS: state.buffers} if state.buffers else {}
    export: Callable[[Mapping[str, Tensor]], dict[str, bytes]] | None = getattr(task, "export_files", None)
    beside = {} if export is None or "ensemble" in model_json else export(state.tensors)
    seen = interface if isinstance(interface, Interface) else Interface.of_task(task, interface)
    described = {**model_json, **buffers, INTERFACE: seen.to_json()}
    save_model(directory, state.tensors, described, state.extra, beside, seen.tensors, is_compressed=is_compressed)


def read_model(directory: str | os.PathLike[str]) -> ModelState:
    """Return the trained model in a directory, on the CPU.

    Raises:
        CheckpointError: the model is missing or damaged.
    """
    tensors, extra = load_model_tensors(directory), load_beside(directory, EXTRA_FILE)
    return ModelState(tensors, extra, load_model_json(directory).get(BUFFERS, {}))


def fill(model: nn.Module, state: ModelState, precision: str | None) -> nn.Module:
    """Load a state into a model that was just built, and return the model.

    Args:
        model: the model, on the CPU.
        state: result of `read_model`, or the model of a checkpoint.
        precision: `train.precision` of the run; None: that of the state.

    Raises:
        CheckpointError: the state does not fit.
    """
    if precision is None:
        dtypes = {tensor.dtype for tensor in state.tensors.values() if tensor.is_floating_point()}
        precision = "float64" if dtypes == {torch.float64} else "float32"
    if precision == "float64":
        convert(model, torch.float64)
    apply_kinds(model, state.buffers)
    load_state(model, folded_for(model, state))
    return model
