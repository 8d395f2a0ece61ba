"""The parameters of `train.batch_schedule`, `train.noise_scale` and `train.lr_scaling`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from orchestray.platform.config.base import AboveZero, BelowOne, Fraction, Positive, Section


class NoiseScale(Section):
    """The measurement of the gradient noise scale."""

    decay: BelowOne = 0.95
    """Decay of the moving means of variance and squared norm of the gradient."""


class LrScaling(Section):
    """A learning rate that follows the size of the batch."""

    rule: Literal["linear", "sqrt"] = "linear"
    """Factor on the rate: batch_size / base_batch_size (`linear`), or its square root (`sqrt`)."""
    base_batch_size: Positive
    """Size of the batch for which `train.optimizer.lr` was chosen."""


class BatchSchedule(Section):
    """The keys that all schedules of the batch size share."""

    max_batch_size: Positive
    """Largest batch."""


class Steps(BatchSchedule):
    """Batches that grow by a factor at given steps (Smith et al., 2018)."""

    type: Literal["steps"]
    """The schedule `steps`."""
    every_steps: Positive | None = None
    """Number of steps between two growths; or give `every_epochs`."""
    every_epochs: Positive | None = None
    """Number of epochs between two growths; or give `every_steps`."""
    factor: Positive = 2
    """Factor of a growth."""

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if (self.every_steps is None) == (self.every_epochs is None):
            raise ValueError("every_steps and every_epochs both say when the batch grows; give one of them")
        return self


class Measured(BatchSchedule):
    """The keys of batches that grow by what is measured of the gradients."""

    every_steps: Positive = 10
    """Number of steps between two looks at the measurements."""


class ByNoiseScale(Measured):
    """Batches that grow to the gradient noise scale (McCandlish et al., 2018, appendix D)."""

    type: Literal["noise_scale"]
    """The schedule `noise_scale`."""
    factor: AboveZero = 1.0
    """Size of the batch in noise scales."""


class ByVariance(Measured):
    """Batches that grow until the variance of their gradient is under a level."""

    type: Literal["variance"]
    """The schedule `variance`."""
    level: AboveZero | None = None
    """Largest variance, summed over all parameters; or give `theta`."""
    theta: Fraction | None = None
    """Largest standard deviation as a part of the gradient's norm (Byrd et al., 2012); or give `level`."""

    @model_validator(mode="after")
    def _check_level(self) -> Self:
        if (self.level is None) == (self.theta is None):
            raise ValueError("level and theta both bound the variance; give one of them")
        return self
