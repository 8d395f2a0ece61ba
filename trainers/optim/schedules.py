"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def lr_at(schedule: Mapping[str, Any], base_lr: float, step: int, total_steps: int | None = None) -> float:
    """Return the learning rate of a step.

    With w warm-up steps and T total steps, step t (the first is 1) has the rate `base_lr` times

    - t / w for t <= w: a line that reaches 1 at the last warm-up step (Goyal et al. 2017, section 2.2);
    - after it, with n = t - w - 1 completed steps of the schedule proper, and p = min(1, n / (T - w)):

      - constant: 1
      - step: gamma ** floor(n / every_steps)
      - cosine: min_factor + (1 - min_factor) (1 + cos(pi p)) / 2   (Loshchilov and Hutter 2017, equation 5)
      - linear: 1 + (end_factor - 1) p

    A class ("module:Class") gives the rate itself, as to an optimizer of rate `base_lr` after n steps.

    So the first step after the warm-up has the full rate. The last step of the run has a rate just above the final one,
    and steps beyond T have the final rate.

    Args:
        schedule: `type` and the parameters of that type: `warmup_steps`, `every_steps`, `gamma`, `total_steps`,
        `min_factor`, `end_factor`, same as in the config's `train.lr_schedule`.
        base_lr: the optimizer's rate.
        step: counts from 1.
        total_steps: T if the schedule does not give it: the number of steps of the run.
    """
    if step < 1:
        raise ValueError(f"The first step is step 1; got step {step}.")
    warmup_steps = int(schedule.get("warmup_steps", 0))
    if step <= warmup_steps:
        return base_lr * (step / warmup_steps)
    done = step - warmup_steps - 1
    kind = schedule.get("type", "constant")
    if ":" in kind:
        from orchestray.trainers.optim.class_schedule import rate_at

        return rate_at(schedule, base_lr, done)
    if kind == "constant":
        return base_lr
    if kind == "step":
        return base_lr * float(schedule["gamma"] ** (done // schedule["every_steps"]))
    if kind not in ("cosine", "linear"):
        raise ValueError(f"Unknown schedule {kind!r}; there are constant, step, cosine and linear.")
    horizon = schedule.get("total_steps") or total_steps
    if horizon is None:
        raise ValueError(f"The schedule {kind!r} needs to know how many steps there are; give it total_steps.")
    part = min(1.0, done / max(1, horizon - warmup_steps))
    if kind == "cosine":
        least = float(schedule.get("min_factor", 0.0))
        return base_lr * (least + (1.0 - least) * (1.0 + math.cos(math.pi * part)) / 2.0)
    return base_lr * (1.0 + (float(schedule.get("end_factor", 0.0)) - 1.0) * part)
