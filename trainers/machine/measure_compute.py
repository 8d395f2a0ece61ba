"""Measurements of one process: products of matrices, copies, small operations, the disk."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from orchestray.platform.process import torch_threads
from orchestray.trainers.machine import kept
from orchestray.trainers.machine.gemm import GemmTable, shapes
from orchestray.trainers.machine.profile import Compute

SIZES = (1, 4, 16, 64, 256, 1024, 4096)
"""Sizes of the dimensions of the products that are measured."""
QUICK_SIZES = SIZES[::2]
"""Those of a quick measurement: a fifth of the shapes."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SAMPLE_S = 1e-4
"""Least seconds of a sample: shorter calls are repeated within one."""
_LONG_S = 1e-3
_MOST_S = 10e-3
"""Seconds of a product, at the highest speed so far, beyond which it is not measured."""
_TABLE_S = 8.0
"""Seconds after which a table is filled by what there is: only a machine that does much else needs as long."""
_COPIED_BYTES = 64 << 20
_FILE_BYTES, _FILE_CHUNK_BYTES = 128 << 20, 8 << 20
_FILE_LIMIT_S = 2.0


def computing(threads: int, sizes: Sequence[int] = SIZES) -> Compute:
    """Measure products, copies and small operations with a number of threads."""
    with torch_threads.using(threads):
        tables = {name: gemm_table(dtype, sizes) for name, dtype in DTYPES.items()}
        return Compute(tables, copy_bytes_per_s(), small_op_s())


def gemm_table(dtype: torch.dtype, sizes: Sequence[int] = SIZES, passes: int = 2) -> GemmTable:
    """Measure products of matrices of every shape of some sizes, with the current number of threads.

    Of several passes over all shapes the shortest time of each is kept: what else runs comes and goes. A product that
    would take long is not measured; its time is that of a smaller one, grown like the work.
    """
    every = shapes(sizes)
    places = places_for(max(sizes), dtype)
    found: dict[tuple[int, int, int], float] = {}
    products_per_s, began_s = 0.0, perf_counter()
    for _ in range(passes):
        for shape in sorted(every, key=math.prod):
            work, smaller = math.prod(shape), _smaller(shape, sizes)
            is_long = work > products_per_s * _MOST_S or perf_counter() - began_s > _TABLE_S
            if is_long and smaller in found:
                found[shape] = min(found[smaller] * work / math.prod(smaller), found.get(shape, math.inf))
                continue
            found[shape] = min(product_s(*shape, places), found.get(shape, math.inf))
            products_per_s = max(products_per_s, work / found[shape])
    return GemmTable(tuple(sizes), tuple(found[shape] for shape in every))


def _smaller(shape: tuple[int, int, int], sizes: Sequence[int]) -> tuple[int, int, int]:
    """Return the shape with the next smaller size of its largest dimension."""
    largest = max(shape)
    below = sizes[max(0, sizes.index(largest) - 1)]
    place = shape.index(largest)
    m, n, k = (below if each == place else size for each, size in enumerate(shape))
    return m, n, k


def places_for(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the memory of a product: two factors of ones and a result, each flat, of `size` squared elements.

    Products of all shapes use it one after the other: to get new memory takes longer than many of them.
    """
    first, second, out = (torch.ones(size * size, dtype=dtype) for _ in range(3))
    return first, second, out


def product_s(m: int, n: int, k: int, places: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the seconds of a product of matrices [m, k] and [k, n].

    It is the mean of three, as a linear layer and its gradients need them. In one the matrices are as they are, in one
    the first is transposed, in one the second.
    """
    first, second, result = places
    a, b, out = first[: m * k], second[: k * n], result[: m * n].view(m, n)
    pairs = (
        (a.view(m, k), b.view(k, n)),
        (a.view(m, k), b.view(n, k).t()),
        (a.view(k, m).t(), b.view(k, n)),
    )
    return sum(_call_s(_product(left, right, out)) for left, right in pairs) / len(pairs)


def _product(left: Tensor, right: Tensor, out: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.mm(left, right, out=out)


def _call_s(call: Callable[[], object]) -> float:
    """Return the seconds of a call that was made before; of short ones, the median of several samples."""
    call()
    took_s = _timed(call, 1)
    calls = max(1, round(_SAMPLE_S / max(took_s, 1e-7)))
    return median(_timed(call, calls) for _ in range(3)) if took_s < _LONG_S else took_s


def _timed(call: Callable[[], object], calls: int) -> float:
    began_s = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - began_s) / calls


def copy_bytes_per_s() -> float:
    """Return the bytes that a copy beyond the caches reads and writes in a second."""
    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * _COPIED_BYTES / min(_timed(lambda: target.copy_(source), 1) for _ in range(7))


def small_op_s() -> float:
    """Return the seconds of an addition of two tensors of one element."""
    one = torch.ones(1)
    return median(_timed(lambda: one + one, 200) for _ in range(15))


def reference_s() -> float:
    """Return the seconds of one product by all cores, measured again and again to tell how steady the machine is."""
    with torch_threads.using(kept.cores()):
        a = torch.ones(512, 512)
        return median(_timed(lambda: a @ a, 1) for _ in range(25))


def disk_bytes_per_s(directory: Path) -> float:
    """Return the bytes that a file in a directory gets in a second, until they are on the disk."""
    chunk, written = os.urandom(_FILE_CHUNK_BYTES), 0
    with tempfile.TemporaryFile(dir=directory) as file:
        began_s = perf_counter()
        while written < _FILE_BYTES and perf_counter() - began_s < _FILE_LIMIT_S:
            file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            written += len(chunk)
        return written / (perf_counter() - began_s)
