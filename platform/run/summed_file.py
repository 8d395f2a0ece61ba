"""A file of a checkpoint, written in large pieces while its checksum is taken. torch is imported only for tensors."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import CheckpointError
from orchestray.platform.process.pulse import PULSE
from orchestray.platform.run.checkpoint_files import CHUNK_BYTES, FileSum

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from orchestray.platform.run.staging import Staging
    from orchestray.platform.run.tensor_file import TensorLayout


class _SummedFile:
    """A file that begins with the header of its layout."""

    def __init__(self, write: Callable[[Any], object], layout: TensorLayout) -> None:
        self._write, self._layout, self._crc = write, layout, 0
        self.add(layout.header)

    def add(self, data: Any) -> None:
        """Write bytes in pieces: the checksum and the write of each release the GIL."""
        for start in range(0, len(data), CHUNK_BYTES):
            piece = data[start : start + CHUNK_BYTES]
            self._crc = zlib.crc32(piece, self._crc)
            self._write(piece)
            PULSE.beats += 1

    @property
    def sum(self) -> FileSum:
        """Size of the whole file, and the checksum so far."""
        return FileSum(len(self._layout.header) + self._layout.num_value_bytes, self._crc)


def write_staged(write: Callable[[Any], object], staging: Staging) -> FileSum:
    """Write all tensors of a staging buffer; return the size and the checksum of the file.

    Args:
        write: writes bytes to the file.
        staging: buffer that holds the tensors.
    """
    file = _SummedFile(write, staging.layout)
    file.add(staging.values.data)
    return file.sum


def write_streamed(
    write: Callable[[Any], object],
    layout: TensorLayout,
    produce: Callable[[Callable[[str, torch.Tensor], None]], None],
) -> FileSum:
    """Write tensors one at a time; return the size and the checksum of the file.

    Args:
        write: writes bytes to the file.
        layout: layout of the file.
        produce: calls the function that it gets with name and tensor (CPU) of each, in the order of the layout.

    Raises:
        CheckpointError: a tensor comes out of turn.
    """
    from orchestray.platform.run.tensor_file import as_bytes

    names = iter(layout.slots)
    file = _SummedFile(write, layout)

    def take(name: str, tensor: torch.Tensor) -> None:
        if name != (expected := next(names)):
            raise CheckpointError(f"the tensor {expected!r} was to be saved, and {name!r} came")
        file.add(as_bytes(tensor).data)

    produce(take)
    return file.sum
