"""A chain of layers in groups that keep only their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from orchestray.platform.data.even_split import split_evenly
from orchestray.trainers.parallel.recompute.checkpointed import Segment

if TYPE_CHECKING:
    from orchestray.trainers.core.rng import RngKey
    from orchestray.trainers.parallel.recompute.meter import ActivationMeter


class Chain:
    """A sequence of layers, each of which takes what the one before it returns."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        names: Sequence[str] | None = None,
        *,
        num_live: int = 1,
        draw: RngKey | None = None,
        meter: ActivationMeter | None = None,
    ) -> None:
        """
        Args:
            layers: the layers, in the order they are called; the first one may take several values.
            names: names of the layers, for messages; default: their indices.
            num_live: see `recompute`.
            draw: see `recompute`.
            meter: see `recompute`.
        """
        names = names or [str(index) for index in range(len(layers))]
        self.groups = [
            Segment(
                f"layers {names[start]!r} to {names[stop - 1]!r}",
                partial(_through, layers[start:stop]),
                layers[start:stop],
                draw=draw,
                meter=meter,
            )
            for start, stop in group(units_of([holds_parameters(layer) for layer in layers]), num_live)
        ]
        self._calls = calls_of(self.groups, num_live)

    def __call__(self, *values: Any) -> Any:
        result: Any = None
        for index, call in enumerate(self._calls):
            result = call(*values) if index == 0 else call(result)
        return result


def units_of(begins: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the runs of layers that stay together, as (start, stop).

    A run is a layer that holds parameters and the layers without parameters after it. So an activation function stays
    with the layer before it, whose output it may change in place.
    """
    if not any(begins):
        return [(index, index + 1) for index in range(len(begins))]
    starts = [index for index, is_first in enumerate(begins) if is_first]
    starts[0] = 0
    return list(zip(starts, [*starts[1:], len(begins)], strict=True))


def group(units: Sequence[tuple[int, int]], num_live: int = 1) -> list[tuple[int, int]]:
    """Divide the units into groups of nearly equal size, and return each group's layers as (start, stop).

    With n units in k groups, each live micro-batch keeps k inputs, and n/k units' activations exist while one goes
    backward. num_live k + n/k is least at k = sqrt(n / num_live).
    """
    num_groups = max(1, min(round(math.sqrt(len(units) / num_live)), len(units)))
    return [
        (units[first][0], units[last - 1][1]) for first, last in split_evenly(len(units), num_groups) if first < last
    ]


def calls_of(groups: Sequence[Segment], num_live: int) -> list[Callable[..., Any]]:
    """Return what computes each group: its segment, or plainly its layers for a
    last group whose backward pass comes next.
    """
    calls: list[Callable[..., Any]] = list(groups)
    if num_live == 1 and calls:
        calls[-1] = groups[-1].function
    return calls


def holds_parameters(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters())


def copied(values: Sequence[Any], first: nn.Module) -> Sequence[Any]:
    """Copy the values if the first module that takes them changes them in place: recomputation needs them again."""
    if not getattr(first, "inplace", False):  # torch's name for it
        return values
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def _through(layers: Sequence[nn.Module], *values: Any) -> Any:
    result: Any = None
    for index, layer in enumerate(layers):
        result = layer(*copied(values, layer)) if index == 0 else layer(result)
    return result
