"""The choice of cuts: consecutive layers form stages whose costs are as even as possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from math import inf
from typing import Any

import numpy as np

from orchestray.platform.errors import ConfigError

Bounds = list[tuple[int, int]]
"""Layers of each stage, as (start, stop)."""
_SHOWN = 12


def balanced(
    costs: Sequence[float],
    num_stages: int,
    memory: Sequence[float] | None = None,
    memory_limit: float | None = None,
    forbidden: Collection[int] = (),
) -> Bounds:
    """Return the cut that minimizes the largest cost of a stage and, among those, the sum of squared costs.

    Dynamic programming over the cuts, O(layers^2 stages), runs twice: first for the largest cost, then for the most
    even of the cuts that keep it.

    Args:
        costs: cost of each layer, in any unit.
        num_stages: number of stages; each gets at least one layer.
        memory: bytes of each layer.
        memory_limit: most bytes of a stage.
        forbidden: layers that must not begin a stage, such as `Layers.forbidden_cuts`.

    Raises:
        ConfigError: there are too few layers, or every cut exceeds the limit.
    """
    check_count(len(costs), num_stages)
    largest = _of_each_stage(costs)
    allowed = np.triu(np.ones(largest.shape, dtype=bool), k=1)
    if memory is not None and memory_limit is not None:
        allowed &= _of_each_stage(memory) <= memory_limit
    cuts = [cut for cut in forbidden if 0 <= cut < len(largest)]
    allowed[cuts, :] = allowed[:, cuts] = False
    found, _ = _best(largest, num_stages, allowed, np.maximum)
    if found == inf:
        check_count(len(costs) - len(set(forbidden)), num_stages)
        raise ConfigError(_too_much(memory or [], num_stages, memory_limit))
    # Sums of the same costs differ in their last bits, depending on where they begin.
    bearable = found * (1 + 1e-12) + 1e-300
    _, bounds = _best(largest * largest, num_stages, allowed & (largest <= bearable), np.add)
    return bounds


def by_names(layers: Sequence[str], begins: Sequence[str], num_stages: int | None = None) -> Bounds:
    """Return stages that begin at the named layers; the first stage always begins at the first layer.

    Args:
        layers: the names of all layers, in order.
        begins: names of layers, or of modules that contain several layers, in the order of the layers.
        num_stages: number of stages that must result; default: any.

    Raises:
        ConfigError: a name does not exist or is out of order, or the number of stages is another.
    """
    starts = [0]
    for position, name in enumerate(begins):
        start = _find(layers, name)
        if start == 0 and position == 0:
            continue
        if start <= starts[-1]:
            raise ConfigError(
                f"config: strategy.network.split: {name!r} is layer {start}, and the stage before begins at layer "
                f"{starts[-1]} ({layers[starts[-1]]}). List each name once, in the order in which layers are called."
            )
        starts.append(start)
    if num_stages is not None and len(starts) != num_stages:
        raise ConfigError(
            f"config: strategy.network.split: the names make {len(starts)} stages, and the pipeline has {num_stages}. "
            f"Name the {num_stages - 1} layers that begin the stages after the first."
        )
    return list(zip(starts, [*starts[1:], len(layers)], strict=True))


def check_count(num_layers: int, num_stages: int) -> None:
    """Raise a ConfigError if there are fewer layers than stages."""
    if num_stages < 1:
        raise ValueError(f"there must be at least one stage, got {num_stages}")
    if num_layers < num_stages:
        layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
        raise ConfigError(
            f"config: strategy.network.pipeline: the model has {layers} that a pipeline can cut between, too few for "
            f"{num_stages} stages. Use fewer stages, or give finer layers in the task's layers(model)."
        )


def _find(layers: Sequence[str], name: str) -> int:
    inside = name + "."
    for index, layer in enumerate(layers):
        if layer == name or layer.startswith(inside):
            return index
    near = get_close_matches(name, layers, n=1, cutoff=0.0)
    shown = ", ".join(layers[:_SHOWN]) + (f" and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else "")
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"config: strategy.network.split: there is no layer {name!r}.{meant} The layers are: {shown}.")


def _of_each_stage(values: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return the sum of the layers' values from `start` up to `stop`, at [start, stop]."""
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=float))))
    return sums[None, :] - sums[:, None]


def _best(
    costs: np.ndarray[Any, Any], num_stages: int, allowed: np.ndarray[Any, Any], join: np.ufunc
) -> tuple[float, Bounds]:
    """Return the least cost of a cut, and a cut that has it.

    Args:
        costs: cost of the stage from `start` up to `stop`, at [start, stop].
        num_stages: number of stages.
        allowed: True for each stage that is permitted, indexed like `costs`.
        join: function of the costs of two stages, which gives that of both: `np.add` or `np.maximum`.
    """
    permitted = np.ascontiguousarray(np.where(allowed, costs, inf).T)  # at [stop, start]: minima of rows are faster
    through = np.empty_like(permitted)
    best = np.where(np.arange(len(costs)) == 0, 0.0, inf)
    """Least cost of the first `stop` layers, in as many stages as were placed so far."""
    before = []
    for _ in range(num_stages):
        before.append(best)
        best = join(best, permitted, out=through).min(axis=1)
    bounds: Bounds = []
    stop = len(costs) - 1
    for start_costs in reversed(before):
        start = int(join(start_costs, permitted[stop]).argmin())
        bounds.append((start, stop))
        stop = start
    return float(best[-1]), bounds[::-1]


def _too_much(memory: Sequence[float], num_stages: int, limit: float | None) -> str:
    assert limit is not None
    return (
        f"No cut into {num_stages} stages keeps every stage within {limit:.0f} bytes: the layers take "
        f"{sum(memory):.0f} bytes together, the largest {max(memory):.0f}. Use more stages, smaller micro-batches or "
        "more memory."
    )
