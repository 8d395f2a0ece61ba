"""The sections of optimizers, averages of the weights, and schedules, as unions of the classes in the registries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.trainers.optim.registry import AVERAGES, BATCH_SCHEDULES, OPTIMIZERS, SCHEDULES

if TYPE_CHECKING:
    from orchestray.trainers.optim.batch_params import ByNoiseScale, ByVariance, Steps
    from orchestray.trainers.optim.params import (
        Adagrad,
        Adam,
        AdamW,
        Constant,
        Cosine,
        Ema,
        Kfac,
        Lars,
        Linear,
        OptimizerClass,
        RmsProp,
        ScheduleClass,
        Sgd,
        Step,
        Swa,
        YellowFin,
    )

    Optimizer = Sgd | Adagrad | RmsProp | Adam | AdamW | Lars | Kfac | YellowFin | OptimizerClass
    Average = Ema | Swa
    LrSchedule = Constant | Step | Cosine | Linear | ScheduleClass
    BatchSchedule = Steps | ByNoiseScale | ByVariance
else:
    Optimizer, Average, LrSchedule = OPTIMIZERS.union(), AVERAGES.union(), SCHEDULES.union()
    BatchSchedule = BATCH_SCHEDULES.union()
