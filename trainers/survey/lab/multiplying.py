"""Products of matrices: their speed by size, in one product or sample by sample, and in fixed point."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import seeded, threads, times_s
from orchestray.trainers.survey.operators.fixed_point import FixedPointLinear

SIDES = (8, 16, 32, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 513, 768, 1024)


def gemm(rounds: int = 7, sides: Sequence[int] = SIDES) -> Exhibit:
    """Measure products of square matrices, and how far their times are from a line over the operations."""
    ways = {str(side): partial(torch.matmul, seeded(side, side), seeded(side, side, seed=1)) for side in sides}
    taken = times_s(ways, rounds)
    times = torch.tensor([median(taken[str(side)]) for side in sides], dtype=torch.float64)
    work = torch.tensor([2.0 * side**3 for side in sides], dtype=torch.float64)
    line = fitted(work, times)
    off = (line - times) / times
    rows: list[list[Any]] = [
        [side, float(each * 1e6), float(operations / each / 1e9), float(of_line * 1e6), f"{float(part):+.0%}"]
        for side, each, operations, of_line, part in zip(sides, times, work, line, off, strict=True)
    ]
    rates = [float(row[2]) for row in rows]
    falls = sum(after < before for before, after in pairwise(rates))
    typical, most = float(off.abs().median()), float(off.abs().max())
    findings = [
        f"From {min(rates):.3g} to {max(rates):.3g} GFLOP/s; the speed falls {falls} times from a size to the next.",
        f"The line of the least relative errors is off by {typical:.0%} in the median, and by {most:.0%} at most.",
        f"torch calls the BLAS of {library()} for them; {sides[rates.index(max(rates))]:,} is the fastest size.",
    ]
    columns = ["side", "us", "GFLOP/s", "line, us", "line is off by"]
    return Exhibit("gemm", "Products of square matrices", columns, rows, findings)


def library() -> str:
    """Return the name of the library of linear algebra that this torch was built with."""
    found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return found[1] if found else "an unknown library"


def fitted(x: Tensor, y: Tensor) -> Tensor:
    """Return the values at `x` of the line with the least squares of relative errors."""
    columns = torch.stack([1 / y, x / y], dim=1)
    offset, slope = torch.linalg.lstsq(columns, torch.ones_like(y)[:, None]).solution.flatten()
    line: Tensor = offset + slope * x
    return line


class _Network(nn.Sequential):
    """Fully connected layers, as an acoustic model has them: [samples, inputs] to [samples, outputs]."""

    def __init__(self, inputs: int, width: int, layers: int, outputs: int) -> None:
        sizes = [inputs, *[width] * layers]
        parts = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.Sigmoid())]
        super().__init__(*parts, nn.Linear(width, outputs))


def fully_connected(rounds: int = 7, widths: Sequence[int] = (256, 1024), samples: int = 64) -> Exhibit:
    """Compare a network's samples one by one, as one product over the batch, and with weights and inputs of 8 bits.

    On one thread, as Vanhoucke et al. (2011) have it.
    """
    rows: list[list[Any]] = []
    with threads(1), torch.no_grad():
        for width in widths:
            torch.manual_seed(0)
            network = _Network(440, width, 4, 1000).eval()
            fixed = nn.Sequential(*(FixedPointLinear(one) if isinstance(one, nn.Linear) else one for one in network))
            x = seeded(samples, 440)
            ways = {
                "one by one": partial(_one_by_one, network, x),
                "batched": partial(network, x),
                "one by one, fixed point": partial(_one_by_one, fixed, x),
                "batched, fixed point": partial(fixed, x),
            }
            exact = ways["batched"]()
            torch.testing.assert_close(ways["one by one"](), exact, rtol=1e-4, atol=1e-5)
            agree = float((fixed(x).argmax(1) == exact.argmax(1)).double().mean())
            times = {name: median(taken) / samples * 1e6 for name, taken in times_s(ways, rounds).items()}
            before = times["one by one"]
            rows += [
                [f"440-{width}x4-1000", name, each, before / each, f"{agree:.0%}" if "fixed" in name else None]
                for name, each in times.items()
            ]
    best = [row[3] for row in rows if row[1] == "batched, fixed point"]
    of_batch = [row[3] for row in rows if row[1] == "batched"]
    findings = [
        f"A sample takes {_range(of_batch)} times less as one product over {samples} samples.",
        f"It takes {_less_or_longer(best)} if that is in fixed point too.",
        "Agree: samples whose class is the one of the network in full precision.",
    ]
    columns = ["network", "way", "us a sample", "times as fast", "agree"]
    return Exhibit("fully-connected", "Fully connected layers on one thread", columns, rows, findings)


def _less_or_longer(gains: Sequence[float]) -> str:
    """Return gains in words: below 1 where a processor has no instructions for products of 8-bit integers."""
    return f"{_range(gains)} times less" if max(gains) >= 1 else f"{_range([1 / gain for gain in gains])} times as long"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def _one_by_one(network: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([network(sample[None]) for sample in x])
