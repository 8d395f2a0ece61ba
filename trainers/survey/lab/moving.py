"""Words moved between a fast memory and the rest, and weights of recurrent layers moved between workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.thread_group import run_members
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import seeded
from orchestray.trainers.survey.operators.closed_forms import ConvolutionShape
from orchestray.trainers.survey.operators.lower_bounds import (
    Tile,
    least_pooling_words,
    least_words,
    moved_pooling_words,
    moved_words,
    tiled_convolution,
    words_of_tile,
)
from orchestray.trainers.survey.operators.recurrent import FusedLayer, PersistentCells, next_state

_CONVOLUTIONS = (
    ConvolutionShape(2, 8, 16, 18, 18, (3, 3)),
    ConvolutionShape(1, 32, 32, 9, 9, (1, 1)),
    ConvolutionShape(1, 4, 8, 20, 20, (5, 5)),
)
_MEMORIES = (256, 1024, 4096)
_SIDES = (1, 2, 4, 8, 16, 32)


def traffic(rounds: int = 0, shapes: Sequence[ConvolutionShape] = _CONVOLUTIONS) -> Exhibit:
    """Count the words that each tiling of a convolution moves, and hold them against the bound of Demmel and Dinh."""
    del rounds
    rows: list[list[Any]] = []
    apart = 0.0
    for shape in shapes:
        x = seeded(shape.samples, shape.in_channels, shape.height, shape.width)
        weight = seeded(shape.out_channels, shape.in_channels, *shape.kernel, seed=1)
        for memory in _MEMORIES:
            bound = least_words(shape, memory)
            moved = {tile: moved_words(shape, tile) for tile in _tiles(shape, memory)}
            best = min(moved, key=moved.__getitem__)
            out, carried_out = tiled_convolution(x, weight, best)
            apart = max(apart, float((out - functional.conv2d(x, weight)).abs().max()))
            below = sum(words < bound for words in moved.values())
            kernel = "x".join(map(str, shape.kernel))
            name = f"{kernel}, {shape.in_channels} to {shape.out_channels}, {shape.height} x {shape.width}"
            tile = f"{best.out_channels} x {best.in_channels} x {best.height} x {best.width}"
            rows.append([name, memory, bound, moved[best], carried_out, moved[best] / bound, tile, len(moved), below])
    pooled = ConvolutionShape(2, 8, 8, 16, 16, (2, 2))
    least = least_pooling_words(pooled)
    by_pooling = [moved_pooling_words(pooled, *tile) for tile in itertools.product(_SIDES, repeat=2)]
    words = f"by {len(by_pooling)} tilings {min(by_pooling):,} to {max(by_pooling):,}"
    below, tilings, over = sum(row[-1] for row in rows), sum(row[-2] for row in rows), max(row[5] for row in rows)
    told = "those that were" if all(row[3] == row[4] for row in rows) else "not those that were"
    findings = [
        f"{below} of {tilings:,} tilings move less than the bound; the best are within {over:.2g} times of it.",
        f"Pooling 2 x 8 x 16 x 16 moves {least:,} words at least, {words}.",
        f"The best tilings were carried out: the words are {told} counted, and outputs torch's to {apart:.1g}.",
    ]
    columns = ["convolution", "memory, words", "bound", "best tiling", "carried out", "over the bound"]
    return Exhibit(
        "traffic", "Words moved by tiled convolutions", [*columns, "its tile", "tilings", "below"], rows, findings
    )


def _tiles(shape: ConvolutionShape, memory: int) -> Iterator[Tile]:
    """Yield the tiles that fit into a memory of some words."""
    for sizes in itertools.product(_SIDES, repeat=4):
        tile = Tile(*sizes)
        is_within = sizes[0] <= shape.out_channels and sizes[1] <= shape.in_channels and sizes[2] <= shape.out_height
        if is_within and words_of_tile(shape, tile) <= memory:
            yield tile


def persistent(
    rounds: int = 5, workers: Sequence[int] = (1, 2), steps: int = 32, hidden: int = 256, samples: int = 1
) -> Exhibit:
    """Compare a recurrent layer whose weights stay on their workers with one that fetches them at each time step."""
    torch.manual_seed(0)
    lstm = nn.LSTM(hidden, hidden)
    x = seeded(steps, samples, hidden)
    with torch.no_grad():
        exact = lstm(x)[0]
        layer = FusedLayer(lstm, 0)
        rows: list[list[Any]] = [
            _row("kept", count, run_members(count, partial(_kept, layer, x, exact, rounds))[0]) for count in workers
        ]
        rows += [
            _row("fetched each step", count, run_members(count, partial(_fetched, layer, x, exact, rounds))[0])
            for count in workers
            if count > 1
        ]
    apart = max(row[-1] for row in rows)
    kept, fetched = (max(row[2] for row in rows if (row[0] == "kept") == is_kept) for is_kept in (True, False))
    findings = [
        f"A step moves {kept:,} bytes of weights that are kept, and {fetched:,} of weights that are fetched.",
        f"The states differ from torch's by {apart:.1g} at most.",
    ]
    columns = ["weights", "workers", "bytes of weights a step", "bytes of states a step", "ms a step", "difference"]
    return Exhibit("persistent", "Recurrent weights that stay where they are", columns, rows, findings)


def _row(kind: str, workers: int, found: tuple[float, float, float, float]) -> list[Any]:
    weights, states, seconds, apart = found
    return [kind, workers, int(weights), int(states), seconds * 1e3, apart]


def _kept(
    layer: FusedLayer, x: Tensor, exact: Tensor, rounds: int, group: Collective
) -> tuple[float, float, float, float]:
    """Return bytes of weights, bytes of states and seconds of a step, and the largest difference of the states."""
    with torch.no_grad():
        cells = PersistentCells(layer, group)
        before = group.bytes_sent
        out = cells.run(x)
        sent = (group.bytes_sent - before) / len(x)
        states = (group.size - 1) * x.shape[1] * (exact.shape[-1] // group.size) * x.element_size()
        seconds = _seconds(partial(cells.run, x), rounds) / len(x)
    return sent - states, states, seconds, float((out - exact).abs().max())


def _fetched(
    layer: FusedLayer, x: Tensor, exact: Tensor, rounds: int, group: Collective
) -> tuple[float, float, float, float]:
    """Return the same of a layer whose recurrent weights the first worker sends to the others at each step."""
    of_state = layer.of_state if group.rank == 0 else torch.empty_like(layer.of_state)

    def run() -> Tensor:
        state = cell = x.new_zeros(x.shape[1], exact.shape[-1])
        out = []
        for projected in layer.projected(x):
            group.broadcast(of_state, 0)
            state, cell = next_state(projected + state @ of_state, cell)
            out.append(state)
        return torch.stack(out)

    with torch.no_grad():
        before = group.bytes_sent
        out = run()
        sent = (group.bytes_sent - before) / len(x)
        return sent, 0.0, _seconds(run, rounds) / len(x), float((out - exact).abs().max())


def _seconds(run: Callable[[], Any], rounds: int) -> float:
    """Return the median seconds of a run; each member of a group has as many."""
    taken_s = []
    for _ in range(rounds + 1):
        began_s = perf_counter()
        run()
        taken_s.append(perf_counter() - began_s)
    return median(taken_s[1:])
