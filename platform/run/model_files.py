"""The trained model of a run, `model/`: written atomically, read with its checksum. Imports torch late."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.checkpoint_files import MODEL_FILE, FileSum, read_checked
from orchestray.platform.run.files import dump_json
from orchestray.platform.run.store import LocalStore

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy as np
    import torch

MODEL_JSON = "model.json"
EXTRA_FILE = "extra_state.safetensors"
"""Name of the file with the state of a model's modules besides tensors, if they have any."""
HUFFMAN_FILE = "model.huffman"
"""Name of the file with the tensors of a compressed model, instead of `model.safetensors`: see `huffman_file`."""
EXAMPLE_FILE = "example.safetensors"
"""Name of the file with the tensors of one sample's inputs, if one is known."""


def save_model(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor] | bytes,
    model_json: Mapping[str, Any],
    extra_state: Mapping[str, torch.Tensor] | None = None,
    beside: Mapping[str, bytes] | None = None,
    example: Mapping[str, torch.Tensor] | None = None,
    *,
    is_compressed: bool = False,
) -> None:
    """Write a trained model: `model.safetensors` and `model.json`, both or neither; an older one is replaced.

    Args:
        directory: folder to make.
        tensors: the plain model's tensors by name, or the bytes of a whole safetensors file (needs no torch).
        model_json: JSON values from which the model is rebuilt: `task`, `precision` and `seed`. An ensemble adds
            `ensemble`: {"members": count, "average": "outputs" or "probabilities"} and, if the members' tasks differ,
            the `arguments` of each. Its tensors are named "members.<i>.<name>".
        extra_state: tensors of `extra_state.safetensors`; None or empty: there is no such file.
        beside: further files, by name or path in the folder.
        example: tensors of `example.safetensors`; None or empty: there is no such file.
        is_compressed: True for `model.huffman` instead of `model.safetensors`, with the same tensors.

    Raises:
        StorageError: the disk is full, or not writable.
    """
    optional = {EXTRA_FILE: extra_state, EXAMPLE_FILE: example}
    model = {HUFFMAN_FILE: _compressed(tensors)} if is_compressed else {MODEL_FILE: _packed(tensors)}
    files = {**model, **{name: _packed(each) for name, each in optional.items() if each}}
    sums = {name: {"bytes": len(content), "crc32": zlib.crc32(content)} for name, content in files.items()}
    path = Path(directory).absolute()
    with LocalStore(path.parent).create(path.name) as open_file:
        for name, content in {**files, **(beside or {})}.items():
            with open_file(name) as write:
                write(content)
        with open_file(MODEL_JSON) as write:
            write((dump_json({**model_json, "files": sums}, indent=2) + "\n").encode())


def _packed(tensors: Mapping[str, torch.Tensor] | bytes) -> bytes:
    if isinstance(tensors, bytes):
        return tensors
    from orchestray.platform.run.tensor_file import pack

    return pack(tensors)


def _compressed(tensors: Mapping[str, torch.Tensor] | bytes) -> bytes:
    from orchestray.platform.run.huffman_file import pack_huffman

    if isinstance(tensors, bytes):
        raise TypeError("the bytes of a whole safetensors file cannot be compressed: give its tensors")
    return pack_huffman(tensors)


def load_model_json(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the `model_json` that was saved, with the checksums (`files`).

    Raises:
        CheckpointError: the model is missing, or its `model.json` is damaged.
    """
    path = Path(directory) / MODEL_JSON
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"there is no trained model in {directory}: the run has not finished") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    return value


def load_model_tensors(directory: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a trained model, on the CPU.

    Raises:
        CheckpointError: the model is missing or damaged.
    """
    if is_compressed(directory):
        from orchestray.platform.run.huffman_file import unpack_huffman

        return unpack_huffman(_content(directory, HUFFMAN_FILE).tobytes(), str(Path(directory) / HUFFMAN_FILE))
    return _read(directory, MODEL_FILE)


def is_compressed(directory: str | os.PathLike[str]) -> bool:
    """Return True if a trained model's tensors are in `model.huffman`.

    Raises:
        CheckpointError: the model is missing, or its `model.json` is damaged.
    """
    return HUFFMAN_FILE in load_model_json(directory).get("files", {})


def load_beside(directory: str | os.PathLike[str], file: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an optional file of a trained model; empty if it has no such file.

    Args:
        directory: folder of the model.
        file: `EXTRA_FILE` or `EXAMPLE_FILE`.

    Raises:
        CheckpointError: the model is missing or damaged.
    """
    return _read(directory, file) if file in load_model_json(directory).get("files", {}) else {}


def _read(directory: str | os.PathLike[str], file: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of a trained model, which is checked against `model.json`."""
    from orchestray.platform.run.tensor_file import unpack

    return unpack(_content(directory, file), str(Path(directory).absolute() / file))


def _content(directory: str | os.PathLike[str], file: str) -> np.ndarray[Any, Any]:
    """Return the bytes of a file of a trained model, which are checked against `model.json`."""
    path = Path(directory).absolute()
    sums = load_model_json(path).get("files", {}).get(file)
    store = LocalStore(path.parent)
    if not isinstance(sums, dict) or not {"bytes", "crc32"} <= sums.keys():
        raise CheckpointError(f"{path / MODEL_JSON} is damaged: it has no checksum of {file}")
    if (size := store.size(path.name, file)) != sums["bytes"]:
        raise CheckpointError(f"{path / file} is damaged: {max(size, 0)} bytes, wanted {sums['bytes']}")
    return read_checked(store, path.name, file, FileSum(sums["bytes"], sums["crc32"]))
