"""TensorBoard files of a search: a folder a trial, with its scalars and its hyper-parameters.

tensorboardX imports torch where there is one, so it is imported at the first line.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestray.platform.run.files import storage_errors

_MAX_OPEN = 16
"""Files open at once; a trial that comes back after its was closed goes on in a further file."""


class TrialLogs:
    """The folders `trial-00003` in a search's `tensorboard/`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._num_files = 0

    def scalars(self, trial: int, step: int, values: Mapping[str, float]) -> None:
        """Add numbers at a step."""
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._write(trial, step, scalar(name, value))

    def hyper_parameters(self, trial: int, config: Mapping[str, Any], metrics: Mapping[str, Any], step: int) -> None:
        """Say what a trial was made of and what came of it, and close its file."""
        from tensorboardX.summary import hparams, scalar

        numbers = {name: float(value) for name, value in metrics.items() if value is not None}
        plain = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in config.items()
            if value is not None
        }
        for summary in hparams(plain, numbers):
            self._write(trial, 0, summary)
        if "objective" in numbers:
            self._write(trial, step, scalar("objective", numbers["objective"]))
        self._close(trial)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        for writer in self._open.values():
            with storage_errors(f"write into {self._directory}"):
                writer.flush()

    def close(self) -> None:
        """Close every file."""
        for trial in list(self._open):
            self._close(trial)

    def _write(self, trial: int, step: int, summary: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with storage_errors(f"write into {self._directory}"):
            self._writer(trial).write_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _writer(self, trial: int) -> Any:
        from tensorboardX.event_file_writer import EventsWriter

        if trial not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._close(next(iter(self._open)))
            folder = self._directory / f"trial-{trial:05d}"
            folder.mkdir(parents=True, exist_ok=True)
            self._num_files += 1
            self._open[trial] = EventsWriter(str(folder / "events"), f".{self._num_files:06d}")
        self._open.move_to_end(trial)
        return self._open[trial]

    def _close(self, trial: int) -> None:
        with storage_errors(f"write into {self._directory}"):
            self._open.pop(trial).close()
