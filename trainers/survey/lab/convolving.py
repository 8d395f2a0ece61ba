"""Convolutions by every algorithm, and how each compares with torch's own; layouts; the error of Winograd's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import seeded, times_s
from orchestray.trainers.survey.operators import convolutions, fbfft, fourier, winograd
from orchestray.trainers.survey.operators.autotuner import ALGORITHMS, Algorithm, extra_bytes

ALL: Mapping[str, Algorithm] = {"direct loops": convolutions.direct, **ALGORITHMS}
_SLOW = {"direct loops"}
"""Algorithms that are measured in one round only."""


@dataclass(frozen=True)
class Shape:
    """A convolution whose outputs have the size of its inputs."""

    samples: int
    channels: int
    side: int
    kernel: int

    @property
    def name(self) -> str:
        return f"{self.kernel}x{self.kernel}, {self.samples} x {self.channels} x {self.side} x {self.side}"

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return inputs with their padding, and weights."""
        padding = self.kernel // 2
        x = functional.pad(seeded(self.samples, self.channels, self.side, self.side), [padding] * 4)
        scale = (self.channels * self.kernel**2) ** -0.5
        return x, scale * seeded(self.channels, self.channels, self.kernel, self.kernel, seed=1)


SHAPES = (
    *(Shape(8, 64, 28, 1), Shape(8, 16, 16, 3), Shape(2, 64, 56, 3), Shape(4, 32, 28, 5)),
    *(Shape(4, 16, 32, 7), Shape(4, 16, 32, 11), Shape(2, 8, 48, 31)),
)
SMALL = (Shape(2, 8, 8, 1), Shape(2, 8, 8, 3), Shape(1, 4, 16, 11))
"""Shapes for a try."""


def timed(shape: Shape, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each algorithm that takes the shape, and is equal to torch's own there.

    Raises:
        ValueError: one gives another result.
    """
    x, weight = shape.tensors()
    exact = functional.conv2d(x.double(), weight.double())
    ways = {}
    for name, algorithm in ALL.items():
        if name.startswith("Winograd") and shape.kernel > 7:
            continue  # a tile's error would be larger than its values
        if name == "FFT, unordered" and 2 * shape.kernel > fbfft.LARGEST:
            continue
        found = algorithm(x, weight)
        off = float((found.double() - exact).abs().max())
        if off > 1e-2:
            raise ValueError(f"{name} is off by {off:.2g} for {shape.name}")
        ways[name] = partial(algorithm, x, weight)
    with torch.no_grad():
        slow = times_s({name: way for name, way in ways.items() if name in _SLOW}, min(rounds, 2))
        return {**times_s({name: way for name, way in ways.items() if name not in _SLOW}, rounds), **slow}


def convolving(rounds: int = 7, shapes: Sequence[Shape] = SHAPES) -> Exhibit:
    """Compare all algorithms, by shape."""
    rows: list[list[Any]] = []
    medians: dict[Shape, dict[str, float]] = {}
    for shape in shapes:
        times = {name: median(taken) for name, taken in timed(shape, rounds).items()}
        medians[shape] = times
        others = {name: taken for name, taken in times.items() if name != "torch"}
        best = min(others, key=others.__getitem__)
        cells = [times[name] * 1e3 if name in times else None for name in ALL]
        rows.append([shape.name, *cells, f"{best}, {others[best] / times['torch']:.2g} x torch"])
    columns = ["kernel, inputs", *(f"{name}, ms" for name in ALL), "best other"]
    found = [*findings(medians), unordered(medians), *pruning()]
    return Exhibit("convolutions", "Convolutions by every algorithm", columns, rows, found)


def unordered(medians: Mapping[Shape, Mapping[str, float]]) -> str:
    """Return how long transforms without bit reversal take, relative to those of torch in tiles of the same kind."""
    ratios = [one["FFT, unordered"] / one["FFT, tiled"] for one in medians.values() if "FFT, unordered" in one]
    return (
        f"FFT without bit reversal in tiles of at most {fbfft.LARGEST} x {fbfft.LARGEST} takes {min(ratios):.2g} to "
        f"{max(ratios):.2g} times as long as torch's in order."
    )


def pruning(cases: Sequence[tuple[int, int, int]] = ((2, 3, 64), (3, 3, 64))) -> list[str]:
    """Return how many times fewer operations a kernel's transform has that leaves out the lines of zeros.

    Args:
        cases: dimensions, side of the kernel, side of what it is padded to.
    """
    found = []
    for dimensions, kernel, side in cases:
        weight, sizes = seeded(*[kernel] * dimensions), [side] * dimensions
        whole, few = (traced(partial(way, weight, sizes)).work for way in (fourier.padded, fourier.pruned))
        of, to = ("x".join([str(number)] * dimensions) for number in (kernel, side))
        found.append(f"The transform of a kernel of {of} in {to} has {whole / few:.2f} times fewer operations pruned.")
    return found


def findings(medians: Mapping[Shape, Mapping[str, float]]) -> list[str]:
    """Return what the median seconds of each algorithm show, by shape."""
    loops = [times["direct loops"] / times["im2col"] for times in medians.values()]
    ahead = sum(one > 1 for one in loops)
    ratios = f"{min(loops):.2g} to {max(loops):.2g}"
    found = [f"im2col is faster than the loops for {ahead} of {len(loops)} shapes, {ratios} times as fast."]
    by_kernel = sorted(medians, key=lambda shape: shape.kernel)
    wins = [min(medians[s]["FFT"], medians[s]["FFT, tiled"]) < medians[s]["im2col"] for s in by_kernel]
    after = [shape.kernel for place, shape in enumerate(by_kernel) if all(wins[place:])]
    found.append(
        f"FFT beats im2col from kernels of {after[0]} x {after[0]} on." if after else "FFT never beats im2col here."
    )
    behind = {}
    for shape, times in medians.items():
        name = min(times, key=times.__getitem__)
        if name != "torch":
            behind[shape.name] = f"{name} ({times['torch'] / times[name]:.2g} times as fast)"
    first = len(medians) - len(behind)
    found.append(f"torch's own is the fastest for {first} of {len(medians)} shapes.")
    return [*found, *(f"Faster than torch's own for {shape}: {name}." for shape, name in behind.items())]


def counted(rounds: int = 0, shapes: Sequence[Shape] = SHAPES[:5]) -> Exhibit:
    """Count the operations, the depth and the bytes of each algorithm, by shape; nothing is computed.

    Args:
        rounds: unused: nothing is timed.
        shapes: convolutions.
    """
    del rounds
    rows: list[list[Any]] = []
    for shape in shapes:
        x, weight = (each.to("meta") for each in shape.tensors())
        for name, algorithm in ALL.items():
            beside = extra_bytes(algorithm, x, weight)  # first: a transform's factors are computed once for a size
            graph = traced(partial(algorithm, x, weight))
            multiplications = sum(each.cost.multiplications for each in graph.operations)
            moved = sum(each.num_bytes for each in graph.operations)
            missing = ", ".join(graph.uncounted) or "none"
            rows.append([shape.name, name, multiplications, graph.work, graph.depth, moved, beside, missing])
    findings = []
    for shape in shapes:
        of_shape = {row[1]: row for row in rows if row[0] == shape.name}
        least = min(of_shape, key=lambda name: of_shape[name][2])
        fewer = of_shape["torch"][2] / of_shape[least][2]
        fewest = f"{least} has {fewer:.2g} times fewer" if fewer > 1 else "none has fewer"
        most = max(of_shape, key=lambda name: of_shape[name][6])
        findings.append(
            f"{shape.name}: {fewest} multiplications than the definition; {most} needs most memory, "
            f"{of_shape[most][6] / 1e6:.3g} MB beside inputs and outputs."
        )
    columns = ["kernel, inputs", "algorithm", "multiplications", "operations", "depth", "bytes moved", "bytes beside"]
    return Exhibit(
        "convolution-costs", "What each algorithm of a convolution costs", [*columns, "not counted"], rows, findings
    )


def winograd_error(rounds: int = 0) -> Exhibit:
    """Show how the error of Winograd's convolution grows with its tiles in single precision, for fewer products."""
    del rounds
    x, weight = Shape(2, 16, 24, 3).tensors()
    exact = functional.conv2d(x.double(), weight.double())
    rows: list[list[Any]] = []
    for outputs in (2, 3, 4, 6, 8):
        off = (winograd.winograd(x, weight, outputs).double() - exact).abs()
        tile = (outputs + 2) ** 2
        rows.append([f"F({outputs}x{outputs}, 3x3)", tile, 9 * outputs**2, 9 * outputs**2 / tile, float(off.max())])
    own = float((functional.conv2d(x, weight).double() - exact).abs().max())
    rows.append(["torch", None, None, 1.0, own])
    growth = float(rows[-2][4]) / float(rows[0][4])
    return Exhibit(
        "winograd",
        "The error of Winograd's convolution",
        ["tile", "products", "by definition", "fewer, times", "largest error"],
        rows,
        [f"From tiles of 2 x 2 to 8 x 8 outputs the error grows {growth:.2g} times; values are about 1."],
    )


def layouts(rounds: int = 7, shapes: Sequence[Shape] = SHAPES[:4]) -> Exhibit:
    """Compare images with samples outermost (NCHW) and innermost (CHWN), in both by im2col, and pooling."""
    rows: list[list[Any]] = []
    for shape in shapes:
        x, weight = shape.tensors()
        chwn = x.permute(1, 2, 3, 0).contiguous()
        ways = {
            "NCHW": partial(convolutions.im2col, x, weight),
            "CHWN": partial(convolutions.in_chwn, chwn, weight),
            "CHWN, transposed twice": partial(convolutions.through_chwn, x, weight),
            "pool NCHW": partial(_pool_nchw, x),
            "pool CHWN": partial(_pool_chwn, chwn),
        }
        torch.testing.assert_close(ways["CHWN"]().permute(3, 0, 1, 2), ways["NCHW"](), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(_pool_chwn(chwn).permute(3, 0, 1, 2), _pool_nchw(x))
        with torch.no_grad():
            found = {name: median(taken) * 1e3 for name, taken in times_s(ways, rounds).items()}
        ratio = found["NCHW"] / found["CHWN, transposed twice"]
        rows.append([shape.name, *found.values(), found["NCHW"] / found["CHWN"], ratio])
    ratios = [float(row[-1]) for row in rows]
    of_pools = [row[4] / row[5] for row in rows]
    columns = [*("NCHW, ms", "CHWN, ms", "CHWN, transposed twice, ms", "pool NCHW, ms", "pool CHWN, ms")]
    return Exhibit(
        "layouts",
        "The order of images in memory",
        ["kernel, inputs", *columns, "NCHW / CHWN", "with transposing"],
        rows,
        [
            f"With both transpositions CHWN is {min(ratios):.2g} to {max(ratios):.2g} times as fast as NCHW.",
            f"CHWN is the faster order for {sum(each > 1 for each in ratios)} of {len(ratios)} shapes, so transposed.",
            f"Pooling in CHWN is {min(of_pools):.2g} to {max(of_pools):.2g} times as fast as in NCHW.",
        ],
    )


def _pool_nchw(x: Tensor) -> Tensor:
    """Return the largest of each square of four, [samples, channels, height, width]."""
    x = x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
    return torch.maximum(
        torch.maximum(x[:, :, ::2, ::2], x[:, :, 1::2, ::2]), torch.maximum(x[:, :, ::2, 1::2], x[:, :, 1::2, 1::2])
    )


def _pool_chwn(x: Tensor) -> Tensor:
    """Return the same of inputs [channels, height, width, samples]."""
    x = x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
    return torch.maximum(
        torch.maximum(x[:, ::2, ::2], x[:, 1::2, ::2]), torch.maximum(x[:, ::2, 1::2], x[:, 1::2, 1::2])
    )
