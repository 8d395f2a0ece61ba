"""A clock in the scripts of peers that train a user's model: times and losses of steps go to a file of each worker.

Lines of those scripts that are there for it, or for equal initial weights, end with `# measuring` and are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch


class Clock:
    """Times at which steps ended, and their losses."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._losses: list[float] = []

    def step(self, loss: torch.Tensor) -> None:
        """Note the end of a step."""
        self._losses.append(float(loss.detach()))
        self._times.append(time.time())

    def write(self, model: torch.nn.Module) -> None:
        """Write what was noted to the folder that the command names, under the worker's rank."""
        found = {
            "times": self._times,
            "losses": self._losses,
            "threads": torch.get_num_threads(),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        path = Path(sys.argv[1]) / f"{os.environ.get('LOCAL_RANK', '0')}.json"
        path.write_text(json.dumps(found), encoding="utf-8")


def callback() -> Any:
    """Return a clock as a callback of Lightning."""
    import lightning

    class Watching(lightning.Callback):
        def __init__(self) -> None:
            self._clock = Clock()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self._clock.step(outputs["loss"])

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self._clock.write(module)

    return Watching()
