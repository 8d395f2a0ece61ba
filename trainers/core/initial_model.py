"""Changes that a run makes to the model that its task builds, before the first step: plain values, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class InitialModel:
    """Changes of a model that was just built: weights drawn, weights loaded, layers frozen, weights normalised."""

    precision: str = "float32"
    """`train.precision`; weights of float64 are not rounded on their way into a model of float64."""
    init: str | None = None
    """Distribution of fresh weights, a name of `drawn_weights.DISTRIBUTIONS`; None: the task's own."""
    init_gain: float = 1.0
    """Factor on drawn weights."""
    init_from: str | None = None
    """Place of saved weights: a run, a folder with `model.safetensors`, or a file; None: there are none."""
    init_except: tuple[str, ...] = ()
    """Patterns of names of parameters and buffers that are not taken from there."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained."""
    weight_norm: bool = False
    """True if weights are trained as a length and a direction."""
    init_keeps: Literal["zeros", "values"] | None = None
    """Property of the loaded weights that training keeps; None: none."""

    @property
    def changes(self) -> bool:
        """True if it changes anything."""
        return bool(self.init or self.init_from or self.freeze or self.weight_norm)
