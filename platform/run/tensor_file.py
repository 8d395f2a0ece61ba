"""Tensors as bytes in the safetensors format, laid out in one flat buffer.

The library's own writer makes a file in one go. A checkpoint needs the layout before the values, so that values can be
copied straight to the buffer they are written from. Format: https://github.com/huggingface/safetensors (8 bytes of
little-endian header length, a JSON header, the values without gaps).
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import CheckpointError
from orchestray.platform.process.pulse import PULSE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import torch

    from orchestray.platform.run.checkpoint_files import FileSum
    from orchestray.platform.run.store import Store

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_TORCH_NAMES = {code: name for name, code in _DTYPES.items()}
_DOUBLES = "complex128"
"""Type that the format lacks: such tensors are F64 with a last dimension of 2, and the header's metadata names them."""
_HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Slot:
    """The place of one tensor's values, in bytes from the beginning of the values."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class TensorLayout:
    """The header of a file and the place of each tensor after it."""

    slots: Mapping[str, Slot]
    header: bytes
    num_value_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> TensorLayout:
        """Return the layout for tensors of these names, dtypes and shapes: wide dtypes first, so that all are aligned.

        Args:
            tensors: tensors by name.
            metadata: further texts for the header's metadata.

        Raises:
            CheckpointError: the format lacks a dtype.
        """
        slots: dict[str, Slot] = {}
        position = 0
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
            tensor = tensors[name]
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in _DTYPES and dtype != _DOUBLES:
                raise CheckpointError(f"tensor '{name}' cannot be saved: safetensors has no dtype {dtype}")
            stop = position + tensor.numel() * tensor.element_size()
            slots[name] = Slot(dtype, tuple(tensor.shape), position, stop)
            position = stop
        entries = {
            name: {
                "dtype": _DTYPES.get(slot.dtype, "F64"),
                "shape": [*slot.shape, *([2] if slot.dtype == _DOUBLES else [])],
                "data_offsets": [slot.start, slot.stop],
            }
            for name, slot in slots.items()
        }
        doubles = [name for name, slot in slots.items() if slot.dtype == _DOUBLES]
        texts = {"format": "pt", **({_DOUBLES: json.dumps(doubles)} if doubles else {}), **(metadata or {})}
        text = json.dumps({"__metadata__": texts, **entries}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return cls(slots, len(text).to_bytes(8, "little") + text, position)


def as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the values of a CPU tensor as a flat uint8 array: a view if the tensor is contiguous, else a copy."""
    import torch

    flat = tensor.detach().resolve_conj().reshape(-1)
    # torch's own view, since NumPy has no bfloat16.
    array: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return array


def pieces(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the whole file of these tensors: the header, then the values of one tensor after the other.

    Args:
        tensors: tensors by name.
        metadata: further texts for the header's metadata.
    """
    layout = TensorLayout.of(tensors, metadata)
    yield layout.header
    for name in layout.slots:
        yield as_bytes(tensors[name].cpu()).data


def pack(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the whole file of these tensors as bytes."""
    return b"".join(pieces(tensors))


def unpack(data: np.ndarray[Any, Any], what: str) -> dict[str, torch.Tensor]:
    """Return the tensors in a file's bytes (a writable flat uint8 array, whose memory they share).

    Raises:
        CheckpointError: the bytes are not a complete safetensors file; `what` names the file.
    """
    import torch

    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if data.size < 8 or not 0 < header_bytes <= min(data.size - 8, _HEADER_LIMIT_BYTES):
        raise CheckpointError(f"{what} is damaged: it has no safetensors header")
    try:
        entries = _entries(data[8 : 8 + header_bytes].tobytes())
        values = data[8 + header_bytes :]
        return {name: _tensor(torch.from_numpy(values), *entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{what} is damaged: its safetensors header makes no sense ({error})") from error


def stream(store: Store, folder: str, file: str, sums: FileSum) -> tuple[list[list[Any]], Iterator[torch.Tensor]]:
    """Read the tensors of a file one at a time; the file's checksum is checked after the last one.

    Returns:
        Name, dtype name and shape of each tensor, in the order of the file; and the tensors in that order.

    Raises:
        CheckpointError: the file is damaged.
        StorageError: the file cannot be read.
    """
    what = f"{store.shown}/{folder}/{file}"
    with store.open_read(folder, file) as source:
        start = _read_exactly(source, 8, what)
        header_bytes = int.from_bytes(start, "little")
        if not 0 < header_bytes <= min(sums.num_bytes - 8, _HEADER_LIMIT_BYTES):
            raise CheckpointError(f"{what} is damaged: it has no safetensors header")
        header = _read_exactly(source, header_bytes, what)
    try:
        ordered = sorted(_entries(bytes(header)).items(), key=lambda item: item[1][2])
        described = [[name, dtype, shape] for name, (dtype, shape, _) in ordered]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{what} is damaged: its safetensors header makes no sense ({error})") from error
    return described, _stream_values(store, folder, file, sums, described, len(start) + len(header))


def _stream_values(
    store: Store, folder: str, file: str, sums: FileSum, described: list[list[Any]], begin: int
) -> Iterator[torch.Tensor]:
    import torch

    what = f"{store.shown}/{folder}/{file}"
    with store.open_read(folder, file) as source:
        crc = zlib.crc32(_read_exactly(source, begin, what))
        for _, name, shape in described:
            dtype: torch.dtype = getattr(torch, name)
            data = _read_exactly(source, math.prod(shape) * dtype.itemsize, what)
            crc = zlib.crc32(data, crc)
            yield (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)
    if crc != sums.crc32:
        raise CheckpointError(f"{what} is damaged: its checksum is not that of what was saved")


def _entries(header: bytes) -> dict[str, tuple[str, list[int], tuple[int, int]]]:
    """Return torch's dtype, the shape and the first and last byte of each tensor of a header."""
    entries = json.loads(header)
    doubles = set(json.loads((entries.pop("__metadata__", None) or {}).get(_DOUBLES, "[]")))
    found = {}
    for name, entry in entries.items():
        dtype, shape = _TORCH_NAMES[entry["dtype"]], [int(size) for size in entry["shape"]]
        if name in doubles:
            dtype, shape = _DOUBLES, shape[:-1]
        start, stop = entry["data_offsets"]
        found[name] = (dtype, shape, (int(start), int(stop)))
    return found


def _read_exactly(source: Any, num_bytes: int, what: str) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        got = source.readinto(view)
        if not got:
            raise CheckpointError(f"{what} is damaged: it ends too early")
        PULSE.beats += 1
        view = view[got:]
    return data


def _tensor(values: torch.Tensor, name: str, shape: list[int], place: tuple[int, int]) -> torch.Tensor:
    import torch

    start, stop = place
    dtype: torch.dtype = getattr(torch, name)
    if not 0 <= start <= stop <= values.numel() or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} at bytes {start} to {stop} of {values.numel()}")
    piece = values[start:stop]
    # Files of other writers may place values at odd addresses, which a view would refuse.
    if start % dtype.itemsize or piece.data_ptr() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).reshape(shape)
