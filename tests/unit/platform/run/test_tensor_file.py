"""Tensors of every type in the safetensors format."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from orchestray.platform.run.checkpoint_files import FileSum
from orchestray.platform.run.store import LocalStore
from orchestray.platform.run.tensor_file import pack, stream, unpack

TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint16, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.complex64, torch.complex128),
)


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for dtype in TYPES:
        values = torch.rand(3, 2, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        made[str(dtype)] = values.to(dtype)
    return {**made, "scalar": torch.tensor(1 + 2j, dtype=torch.complex128), "nothing": torch.zeros(0, 4)}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        and torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
        for name, value in wanted.items()
    )


def test_every_type_is_packed_and_unpacked_bit_for_bit() -> None:
    data = np.frombuffer(pack(tensors()), dtype=np.uint8).copy()
    assert same(unpack(data, "the file"), tensors())


def test_every_type_is_read_one_tensor_after_the_other(tmp_path: Path) -> None:
    data = pack(tensors())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(data)
    store = LocalStore(tmp_path)
    described, values = stream(store, "folder", "file", FileSum(len(data), zlib.crc32(data)))
    assert same(dict(zip((name for name, *_ in described), values, strict=True)), tensors())


@pytest.mark.parametrize("conjugated", [False, True])
def test_other_programs_read_complex_numbers(tmp_path: Path, conjugated: bool) -> None:
    single, double = torch.tensor([1 + 2j]), torch.tensor([[3 - 4j]], dtype=torch.complex128)
    if conjugated:
        single, double = single.conj(), double.conj()
    (tmp_path / "file").write_bytes(pack({"single": single, "double": double}))
    found = load_file(tmp_path / "file")
    assert torch.equal(found["single"], single)
    assert torch.equal(torch.view_as_complex(found["double"]), double)
