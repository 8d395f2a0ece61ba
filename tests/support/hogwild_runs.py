"""Digits, trained by workers that change the same memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from orchestray.trainers.ps.variants.hogwild.shared_values import Shape
from support.central_run import CentralRun, central_settings, train_central
from support.training import digits

SHARED = {"consistency": "asynchronous", "transport": "shared_memory"}
SGD = {"type": "sgd", "lr": 0.1}
ADAM = {"type": "adam", "lr": 0.01}


def task() -> Any:
    return digits(hidden=[24, 16])


def network_task() -> Any:
    return digits(model="cnn", hidden=[4, 6])


def hogwild_run(directory: Path, data: int = 1, make: Any = task, checkpoint: Any = None, **train: Any) -> CentralRun:
    return train_central(make, central_settings(data, SHARED, **train), directory, checkpoint=checkpoint)


def shape(**changed: Any) -> Shape:
    parameters = (("weight", (3, 2)), ("bias", (3,)))
    return replace(Shape(parameters, torch.float64, num_workers=2), **changed)
