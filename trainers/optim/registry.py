"""Optimizers, averages of the weights, and schedules of learning rate and batch size by name."""

from __future__ import annotations

from orchestray.platform.config.base import Section
from orchestray.platform.config.registry import Registry

_PARAMS = "orchestray.trainers.optim.params"
_BATCH_PARAMS = "orchestray.trainers.optim.batch_params"
_CLASSES = "orchestray.trainers.optim.optimizers"
_ADAPTIVE = "orchestray.trainers.optim.adaptive"

OPTIMIZERS: Registry[Section] = Registry(
    "train.optimizer",
    {
        "sgd": (f"{_PARAMS}:Sgd", f"{_CLASSES}:SGD"),
        "adagrad": (f"{_PARAMS}:Adagrad", f"{_ADAPTIVE}:Adagrad"),
        "rmsprop": (f"{_PARAMS}:RmsProp", f"{_ADAPTIVE}:RMSprop"),
        "adam": (f"{_PARAMS}:Adam", f"{_ADAPTIVE}:Adam"),
        "adamw": (f"{_PARAMS}:AdamW", f"{_ADAPTIVE}:AdamW"),
        "lars": (f"{_PARAMS}:Lars", "orchestray.trainers.optim.lars:LARS"),
        "kfac": (f"{_PARAMS}:Kfac", "orchestray.trainers.optim.kfac:KFAC"),
        "yellowfin": (f"{_PARAMS}:YellowFin", "orchestray.trainers.optim.yellowfin:YellowFin"),
    },
    noun="an optimizer",
    own=f"{_PARAMS}:OptimizerClass",
)
AVERAGES: Registry[Section] = Registry(
    "train.average",
    {"ema": (f"{_PARAMS}:Ema", None), "swa": (f"{_PARAMS}:Swa", None)},
    noun="an average of the weights",
)
SCHEDULES: Registry[Section] = Registry(
    "train.lr_schedule",
    {
        "constant": (f"{_PARAMS}:Constant", None),
        "step": (f"{_PARAMS}:Step", None),
        "cosine": (f"{_PARAMS}:Cosine", None),
        "linear": (f"{_PARAMS}:Linear", None),
    },
    noun="a schedule",
    own=f"{_PARAMS}:ScheduleClass",
)
BATCH_SCHEDULES: Registry[Section] = Registry(
    "train.batch_schedule",
    {
        "steps": (f"{_BATCH_PARAMS}:Steps", None),
        "noise_scale": (f"{_BATCH_PARAMS}:ByNoiseScale", None),
        "variance": (f"{_BATCH_PARAMS}:ByVariance", None),
    },
    noun="a schedule of the batch size",
)
