"""A fully connected layer on every grid of workers, between data and model parallelism (1.5D; Gholami et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.thread_group import run_members
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import seeded
from orchestray.trainers.survey.matmul import (
    Grid,
    LayerShape,
    backward_15d,
    best_grid,
    forward_15d,
    grid_bytes,
    grid_groups,
    grids,
)

LAYERS = (LayerShape(120, 120, 12), LayerShape(72, 72, 72), LayerShape(24, 24, 240))
"""Few samples for many weights, as many of each, and many samples for few weights."""


def grid_sweep(rounds: int = 0, workers: Sequence[int] = (4, 6), layers: Sequence[LayerShape] = LAYERS) -> Exhibit:
    """Train a step of each layer on each grid, over real connections, and count the bytes.

    Args:
        rounds: unused: nothing is timed.
        workers: numbers of workers.
        layers: sizes of the layers.
    """
    del rounds
    rows: list[list[Any]] = []
    findings, num_right, num_choices = [], 0, 0
    for size in workers:
        for layer in layers:
            sent = {}
            for grid in grids(size, layer):
                counted = run_members(size, partial(_measured, grid, layer))
                sent[grid] = max(each for each, _ in counted)
                difference = max(each for _, each in counted)
                rows.append(
                    [_words(layer), _ratio(layer), size, _name(grid), grid_bytes(grid, layer), sent[grid], difference]
                )
            best = best_grid(size, layer)
            num_choices += 1
            num_right += sent[best] == min(sent.values())
            findings.append(f"{size} workers, {_ratio(layer):.3g} activations a weight: {_name(best)} sends least.")
    findings.insert(
        0, f"The grid of the fewest bytes by the formula has the fewest counted ones in {num_right} of {num_choices}."
    )
    columns = ["layer", "activations / weights", "workers", "grid", "formula, bytes", "counted, bytes", "difference"]
    return Exhibit("grids", "A layer on grids of parts of the weights x parts of the batch", columns, rows, findings)


def _measured(grid: Grid, layer: LayerShape, world: Collective) -> tuple[int, float]:
    """Return the bytes that a worker sends in a step, and how far its results are from those of one worker."""
    weight, x = seeded(layer.num_outputs, layer.num_inputs), seeded(layer.num_samples, layer.num_inputs, seed=1)
    dy = seeded(layer.num_samples, layer.num_outputs, seed=2)
    row, column = divmod(world.rank, grid.columns)
    own_weight = weight.chunk(grid.rows)[row]
    own_x, own_dy = (each.chunk(grid.columns)[column] for each in (x, dy))
    groups = grid_groups(world, grid)
    before = world.bytes_sent
    y = forward_15d(own_weight, own_x, groups)
    dweight, dx = backward_15d(own_weight, own_x, own_dy, groups)
    sent = world.bytes_sent - before
    wanted = (own_x @ weight.T, (dy.T @ x).chunk(grid.rows)[row], own_dy @ weight)
    return sent, max(map(_apart, (y, dweight, dx), wanted))


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def _ratio(layer: LayerShape) -> float:
    """Return the activations that go in and come out, for each weight."""
    return layer.num_samples * (layer.num_inputs + layer.num_outputs) / (layer.num_inputs * layer.num_outputs)


def _words(layer: LayerShape) -> str:
    return f"{layer.num_inputs} to {layer.num_outputs}, {layer.num_samples} samples"


def _name(grid: Grid) -> str:
    return f"{grid.rows} x {grid.columns}"
