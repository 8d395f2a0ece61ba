"""Tensors of the Open Inference Protocol v2: as JSON, and as bytes behind the JSON (its binary tensor extension).

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md and
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from orchestray.serving.http.problems import wrong_input
from orchestray.serving.models.signature import ANY, kind_of

Array = np.ndarray[Any, np.dtype[Any]]

DATATYPES = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
"""Maps the protocol's names of types to numpy's; see also `TEXTS` and `BFLOAT16`."""
_NAMES = {dtype: datatype for datatype, dtype in DATATYPES.items()}
TEXTS = "BYTES"
"""Name of a type whose values are texts: any JSON value is one, or is written as one."""
BFLOAT16 = "BF16"
"""Name of a type that numpy lacks: its values are the upper halves of float32, and are read as that."""
_VALUES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""Maps numpy's kind of a type to the Python types of JSON values that it accepts."""
_LENGTH_BYTES = 4
_MOST_DIMENSIONS = 16
_LARGEST_SIZE = 2**48
"""Largest dimension: numpy refuses shapes that memory could not hold, even those of no elements at all."""


def datatype_of(dtype: str) -> str:
    """Return the protocol's name of a type."""
    return TEXTS if dtype == ANY else _NAMES[dtype]


def read_tensor(tensor: Any, field: str, blob: memoryview) -> tuple[str, Array, int]:
    """Read one input of a request.

    Args:
        tensor: its JSON: `name`, `shape`, `datatype`, and `data` or `parameters.binary_data_size`.
        field: its name in errors.
        blob: bytes behind the JSON that are not read yet.

    Returns:
        its name, its values, and the number of bytes of `blob` that they took.

    Raises:
        HttpProblem: 422.
    """
    if not isinstance(tensor, dict):
        raise wrong_input(field, "an object with name, shape, datatype and data", kind_of(tensor))
    name = tensor.get("name")
    if not isinstance(name, str):
        raise wrong_input(f"{field}.name", "a text", kind_of(name))
    datatype = tensor.get("datatype")
    if datatype == TEXTS:
        return _read_texts(tensor, field, blob)
    is_half = datatype == BFLOAT16
    if not isinstance(datatype, str) or not (is_half or datatype in DATATYPES):
        raise wrong_input(
            f"{field}.datatype", f"one of {', '.join(DATATYPES)}, {BFLOAT16}, {TEXTS}", repr(datatype)[:60]
        )
    dtype = np.dtype("float32" if is_half else DATATYPES[datatype])
    shape = _shape(tensor.get("shape"), f"{field}.shape")
    num_bytes = parameter(tensor, "binary_data_size")
    if num_bytes is not None:
        if "data" in tensor:
            raise wrong_input(field, "data, or parameters.binary_data_size", "both")
        wanted = math.prod(shape) * (2 if is_half else dtype.itemsize)
        place = f"{field}.parameters.binary_data_size"
        if type(num_bytes) is not int or num_bytes != wanted:
            raise wrong_input(place, f"{wanted} ({datatype} of shape {list(shape)})", repr(num_bytes)[:60])
        if num_bytes > len(blob):
            raise wrong_input(place, f"at most the {len(blob)} bytes that follow", str(num_bytes))
        if is_half:
            upper = np.frombuffer(blob[:num_bytes], dtype="<u2").astype(np.uint32)
            return name, (upper << 16).view(np.float32).reshape(shape), num_bytes
        values = np.frombuffer(blob[:num_bytes], dtype=dtype.newbyteorder("<")).astype(dtype, copy=False)
        if dtype.kind == "b":
            values = values.view(np.uint8) != 0  # any other byte would stay as it is, neither true nor false
        return name, values.reshape(shape), num_bytes
    return name, _values(tensor.get("data"), shape, dtype, f"{field}.data"), 0


def write_tensor(name: str, array: Array, *, binary: bool) -> tuple[dict[str, Any], bytes]:
    """Return one output of an answer: its JSON, and the bytes to put behind that."""
    head: dict[str, Any] = {"name": name, "datatype": datatype_of(str(array.dtype)), "shape": list(array.shape)}
    array = np.ascontiguousarray(array)
    if not binary:
        return {**head, "data": array.reshape(-1)}, b""
    blob = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return {**head, "parameters": {"binary_data_size": len(blob)}}, blob


def _read_texts(tensor: dict[str, Any], field: str, blob: memoryview) -> tuple[str, Array, int]:
    shape, num_bytes = _shape(tensor.get("shape"), f"{field}.shape"), parameter(tensor, "binary_data_size")
    texts: list[str] = []
    content_type = parameter(tensor, "content_type")
    if num_bytes is None:
        values = _flat(tensor.get("data"), shape, f"{field}.data")
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(values):
            raise wrong_input(f"{field}.data", "texts", "other values")
    else:
        place = f"{field}.parameters.binary_data_size"
        if type(num_bytes) is not int or not 0 <= num_bytes <= len(blob):
            raise wrong_input(place, f"at most the {len(blob)} bytes that follow", repr(num_bytes)[:60])
        try:
            texts = [str(text, "utf-8") for text in _elements(blob[:num_bytes])]
        except (EOFError, UnicodeDecodeError):
            raise wrong_input(place, "texts in UTF-8, each behind its length in four bytes", "other bytes") from None
    if len(texts) != math.prod(shape):
        raise wrong_input(f"{field}.shape", f"the shape of {len(texts)} texts", str(list(shape)))
    array = np.empty(len(texts), object)
    array[:] = [_decoded(text, field) for text in texts] if content_type == "base64" else texts
    return tensor["name"], array.reshape(shape), num_bytes or 0


def _decoded(text: str, field: str) -> bytes:
    """Return the bytes in a text, which MLServer's clients say to be in base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise wrong_input(f"{field}.data", "texts in base64, as parameters.content_type says", text[:60]) from None


def _elements(blob: memoryview) -> Iterator[memoryview]:
    """Return the values of a tensor of the type BYTES; raises EOFError where the last is cut off."""
    begin = 0
    while begin < len(blob):
        begin, length = begin + _LENGTH_BYTES, int.from_bytes(blob[begin : begin + _LENGTH_BYTES], "little")
        if begin + length > len(blob):
            raise EOFError
        yield blob[begin : begin + length]
        begin += length


def write_texts(name: str, rows: Sequence[Sequence[str]], *, binary: bool) -> tuple[dict[str, Any], bytes]:
    """Return one output of texts, [rows, texts of a row], as `write_tensor` does."""
    texts = [text for row in rows for text in row]
    head = {"name": name, "datatype": TEXTS, "shape": [len(rows), len(texts) // len(rows)]}
    if not binary:
        return {**head, "data": texts}, b""
    blob = b"".join(struct.pack("<I", len(text)) + text for text in map(str.encode, texts))
    return {**head, "parameters": {"binary_data_size": len(blob)}}, blob


def parameter(tensor: Mapping[str, Any], name: str) -> Any:
    """Return a parameter of a tensor or a request; None: it has none of that name."""
    parameters = tensor.get("parameters")
    return parameters.get(name) if isinstance(parameters, dict) else None


def _shape(value: Any, field: str) -> tuple[int, ...]:
    is_shape = isinstance(value, list) and len(value) <= _MOST_DIMENSIONS
    if not is_shape or any(type(size) is not int or not 0 <= size <= _LARGEST_SIZE for size in value):
        wanted = f"a list of up to {_MOST_DIMENSIONS} sizes from 0 to {_LARGEST_SIZE}"
        raise wrong_input(field, wanted, repr(value)[:60])
    if 0 in value and math.prod(size for size in value if size) > _LARGEST_SIZE:
        raise wrong_input(field, f"sizes whose product is at most {_LARGEST_SIZE}", repr(value)[:60])
    return tuple(value)


def _flat(data: Any, shape: tuple[int, ...], field: str) -> list[Any]:
    """Return the values of a tensor in JSON, which are one list or nested as the shape says."""
    if not isinstance(data, list):
        raise wrong_input(field, "a list of values", "nothing" if data is None else kind_of(data))
    if data and isinstance(data[0], list):
        parts: list[Any] = [data]
        for size in shape:
            if any(not isinstance(part, list) or len(part) != size for part in parts):
                wanted = f"one list of values, or lists nested as the shape {list(shape)} says"
                raise wrong_input(field, wanted, "lists nested in another way")
            parts = list(chain.from_iterable(parts))
        data = parts
    if len(data) != math.prod(shape):
        raise wrong_input(field, f"{math.prod(shape)} values (shape {list(shape)})", str(len(data)))
    return [*data]


def _values(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any], field: str) -> Array:
    data = _flat(data, shape, field)
    allowed = _VALUES[dtype.kind]
    if not allowed.issuperset(map(type, data)):
        index = next(index for index, value in enumerate(data) if type(value) not in allowed)
        raise wrong_input(f"{field}[{index}]", f"a value of type {dtype}", kind_of(data[index]))
    try:
        with np.errstate(over="ignore"):
            return np.array(data, dtype=dtype).reshape(shape)
    except OverflowError:
        raise wrong_input(field, f"values that fit {dtype}", "values that do not") from None
