"""A search config that is right, for tests to change some keys of."""

from __future__ import annotations

from typing import Any

LR = {"type": "log_uniform", "low": 1e-4, "high": 1.0}
BASE: dict[str, Any] = {
    "task": {"type": "digits", "hidden": [16, 16]},
    "train": {"batch_size": 8, "epochs": 3, "optimizer": {"type": "sgd", "lr": 0.1}},
}
GOOD: dict[str, Any] = {
    "name": "a",
    "base": BASE,
    "search": {
        "method": {"type": "random"},
        "objective": {"metric": "accuracy"},
        "space": {"train.optimizer.lr": LR},
        "budget": {"trials": 4, "steps_per_trial": 20},
    },
}
