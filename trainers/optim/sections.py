"""The sections `train.optimizer` and `train.lr_schedule`, as unions of the classes in the registries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.trainers.optim.registry import OPTIMIZERS, SCHEDULES

if TYPE_CHECKING:
    from orchestray.trainers.optim.params import (
        Adagrad,
        Adam,
        AdamW,
        Constant,
        Cosine,
        Lars,
        Linear,
        OptimizerClass,
        RmsProp,
        ScheduleClass,
        Sgd,
        Step,
        YellowFin,
    )

    Optimizer = Sgd | Adagrad | RmsProp | Adam | AdamW | Lars | YellowFin | OptimizerClass
    LrSchedule = Constant | Step | Cosine | Linear | ScheduleClass
else:
    Optimizer, LrSchedule = OPTIMIZERS.union(), SCHEDULES.union()
