"""TensorBoard files of a search: a folder per trial, with its scalars and its hyper-parameters."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestray.platform.run.tensorboard import TensorBoardLog

_MAX_OPEN = 16
"""Maximum number of open files; a trial that reports after its file was closed continues in a second one."""


class TrialLogs:
    """The log folders of the trials (`trial-00003`) in a search's `tensorboard/`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[int, TensorBoardLog] = OrderedDict()

    def scalars(self, trial: int, step: int, values: Mapping[str, float]) -> None:
        """Log numbers at a step."""
        self._log(trial).scalars(step, values)

    def hyper_parameters(self, trial: int, config: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> None:
        """Log the hyper-parameters and the results of a trial, and close its file."""
        numbers = {name: float(value) for name, value in metrics.items() if value is not None}
        plain = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in config.items()
            if value is not None
        }
        self._log(trial).hyper_parameters(plain, numbers)
        if "objective" in numbers:
            self._log(trial).scalars(step, {"objective": numbers["objective"]})
        self._open.pop(trial).close()

    def flush(self) -> None:
        """Flush all open files to the operating system."""
        for log in self._open.values():
            log.flush()

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].close()

    def _log(self, trial: int) -> TensorBoardLog:
        if trial not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[trial] = TensorBoardLog(self._directory / f"trial-{trial:05d}")
        self._open.move_to_end(trial)
        return self._open[trial]
