"""The size of the batch: by the step (`steps`), or by what is measured of the gradients (`noise_scale`, `variance`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestray.trainers.optim.noise_scale import NoiseScale


def changes_by_step(schedule: Mapping[str, Any], batch_size: int, num_samples: int) -> list[tuple[int, int]]:
    """Return the steps after which batches grow, each with the new size, by the schedule `steps`.

    Args:
        schedule: `every_steps` or `every_epochs`, `factor` and `max_batch_size`, as in `train.batch_schedule`.
        batch_size: samples of a batch at the start.
        num_samples: samples of an epoch.
    """
    changes: list[tuple[int, int]] = []
    step, size, most = 0, batch_size, schedule["max_batch_size"]
    while schedule["factor"] > 1 and size < most:
        step += schedule["every_steps"] or schedule["every_epochs"] * -(-num_samples // size)
        size = min(size * schedule["factor"], most)
        changes.append((step, size))
    return changes


def measured_size(schedule: Mapping[str, Any], noise: NoiseScale, batch_size: int) -> int:
    """Return the size that batches are to have by the schedules `noise_scale` and `variance`.

    The batch is doubled until it is large enough, and never becomes smaller. Where noise hides the gradient, so that no
    size is known to be enough, it is doubled once.

    Args:
        schedule: keys of `train.batch_schedule`.
        noise: what was measured.
        batch_size: samples of a batch now.
    """
    wanted = _wanted(schedule, noise, batch_size)
    size, most = batch_size, max(batch_size, schedule["max_batch_size"])
    while size < min(wanted, most):
        size = min(2 * size, most)
    return size


def _wanted(schedule: Mapping[str, Any], noise: NoiseScale, batch_size: int) -> float:
    if schedule["type"] == "variance" and schedule["level"] is not None:
        return noise.trace / float(schedule["level"])
    scale = noise.scale
    if scale is None:
        return batch_size + 1
    if schedule["type"] == "noise_scale":
        return float(schedule["factor"]) * scale
    # S / B <= theta^2 |G_B|^2, where |G_B|^2 is |G|^2 + S / B in the mean.
    theta = float(schedule["theta"])
    return scale * (1.0 - theta**2) / theta**2


def scaled_lr(scaling: Mapping[str, Any] | None, lr: float, batch_size: int) -> float:
    """Return the learning rate for a batch: linear in its size (Goyal et al., 2017), or in the root of it.

    Args:
        scaling: `rule` and `base_batch_size`, as in `train.lr_scaling`; None: the rate stays.
        lr: rate for a batch of the base's size.
        batch_size: samples of a batch.
    """
    if scaling is None:
        return lr
    ratio = batch_size / int(scaling["base_batch_size"])
    return lr * (ratio if scaling["rule"] == "linear" else ratio**0.5)
