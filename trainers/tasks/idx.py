"""The IDX format of MNIST and its kin: arrays of numbers in files, maybe compressed by gzip (LeCun et al. 1998)."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from orchestray.platform.errors import DataError

_GZIP = b"\x1f\x8b"
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""Types of the numbers by their code, the third byte of a file."""


def read_idx(file: Path, checksum: str | None = None) -> np.ndarray:
    """Return the array in a file, in the byte order of this machine.

    Args:
        file: the file, compressed or not.
        checksum: SHA-256 of the file as it is, in hexadecimal; None: it is not checked.

    Raises:
        DataError: the file cannot be read, is another one, or holds no such array.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
    found = hashlib.sha256(content).hexdigest()
    if checksum is not None and found != checksum.lower():
        raise DataError(f"{file} is not the file that task.checksums names: its SHA-256 is {found}, wanted {checksum}")
    if content[:2] == _GZIP:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{file} is damaged: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        begin = content[:4].hex(" ") or "nothing"
        raise DataError(f"{file} is no IDX file: it begins with {begin}, wanted 00 00 and the code of a type")
    kind, num_sizes = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * num_sizes
    if len(content) < start:
        raise DataError(f"{file} is damaged: it ends within its {num_sizes} sizes")
    sizes = struct.unpack(f">{num_sizes}I", content[4:start])
    wanted = math.prod(sizes) * kind.itemsize
    if len(content) - start != wanted:
        shown = " x ".join(map(str, sizes))
        raise DataError(
            f"{file} is damaged: {shown} numbers need {wanted:,} bytes, and it has {len(content) - start:,}"
        )
    return np.frombuffer(content, dtype=kind, offset=start).reshape(sizes).astype(kind.newbyteorder("="), copy=False)
