"""A search config that is right, for tests to change some keys of."""

from __future__ import annotations

from typing import Any

from orchestray.search.config.load import load_search_config

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


def tiny_search(space: dict[str, Any], optimizer: dict[str, Any], **search: Any) -> Any:
    """Return the config of a search for the accuracy of the tiny task, in batches of 8.

    Args:
        space: of the search.
        optimizer: of the base.
        search: other keys of the search.
    """
    return load_search_config(
        {
            "name": "tiny",
            "base": {
                "task": {"type": "support.tiny_task:TinyTask"},
                "train": {"batch_size": 8, "optimizer": optimizer},
            },
            "search": {"objective": {"metric": "accuracy"}, "space": space, **search},
        }
    )
