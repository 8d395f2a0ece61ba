"""Loop that a gang's member hosts in the recording benchmark: it does nothing but record a line a step."""

from __future__ import annotations

import time
from typing import Any

from orchestray.platform.run.recorder import Recorder

_DRAIN_EVERY_STEPS = 1024


class RecordingLoop:
    """Loop that records lines as `trainers/loop/replica.py` does; the driver drains them as its `host.py` does."""

    def __init__(self) -> None:
        self._recorder = Recorder()

    def record(
        self, first_step: int, num_lines: int, per_second: float | None, started_at: float, drained: bool
    ) -> tuple[list[float], float]:
        """Record `num_lines` lines, at a rate or (None) as fast as it goes.

        Returns:
            The seconds each line took the loop, from before it was put together, and the seconds all took.
        """
        taken_s = []
        began_s = time.perf_counter()
        for number in range(num_lines):
            if per_second is not None:
                # Sleeping, as a loop does inside its tensor operations: the interpreter is free for others meanwhile.
                time.sleep(max(0.0, began_s + number / per_second - time.perf_counter()))
            before_s = time.perf_counter()
            step = first_step + number
            line: dict[str, Any] = {
                "step": step,
                "epoch": step // 1000 + 1,
                "time_s": round(time.time() - started_at, 6),
                "loss": 0.6931471805599453,
                "lr": 0.1,
                "samples_per_s": 64 / 0.0123,
            }
            line["bytes_sent"] = 123456
            line["grad_norm"] = 1.25
            self._recorder.record(line)
            if not drained and step % _DRAIN_EVERY_STEPS == 0:
                self._recorder.drain(0.0)
            taken_s.append(time.perf_counter() - before_s)
        return taken_s, time.perf_counter() - began_s

    def drain(self, timeout_s: float, min_interval_s: float) -> list[dict[str, Any]]:
        return self._recorder.drain(timeout_s, min_interval_s)
