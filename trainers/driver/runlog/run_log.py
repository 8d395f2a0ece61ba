"""The driver's record of a run: each line is written once, whatever was lost in between."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestray.trainers.driver.runlog.goodput import Goodput
from orchestray.trainers.driver.runlog.output_log import OutputLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestray.platform.run.writer import RunWriter
    from orchestray.platform.terminal.progress import Progress
    from orchestray.trainers.driver.runlog.scale_requests import ScaleRequests


@dataclass
class RunProgress:
    """The progress of a run, as far as the driver has seen it."""

    started_at: float
    last_step: int = 0
    """Last step of the metric lines written."""
    last_validated_step: int = 0
    written_step: int = 0
    """Step up to which the lines have reached the operating system, so that a kill of this process cannot lose them."""
    restarts: int = 0
    first_step_s: float | None = None
    lost_at_s: float | None = None
    """Time at which the members now being replaced were lost, in seconds of the run."""
    total_steps: int | None = None
    checkpoints: list[int] = field(default_factory=list)
    goodput: Goodput = field(default_factory=Goodput)

    def now_s(self) -> float:
        return time.time() - self.started_at

    def is_news(self, line: Mapping[str, Any]) -> bool:
        """Return True if a metric line was not seen before; copies of lines come after a loss."""
        step = int(line["step"])
        if "split" in line:
            if step <= self.last_validated_step:
                return False
            self.last_validated_step = step
            return True
        if step <= self.last_step:
            return False
        self.last_step = step
        if self.first_step_s is None:
            self.first_step_s = float(line["time_s"])
        return True

    def is_recovered_by(self, line: Mapping[str, Any]) -> bool:
        """Return True if this is the line of the first step after a loss; lines of earlier steps may come later."""
        return self.lost_at_s is not None and "split" not in line and float(line["time_s"]) > self.lost_at_s

    def go_back_to(self, step: int) -> bool:
        """Forget what was seen of later steps, which will be done again; return True if there was any."""
        later = max(self.last_step, self.last_validated_step) > step
        self.last_step, self.last_validated_step = min(self.last_step, step), min(self.last_validated_step, step)
        self.written_step = min(self.written_step, step)
        return later


def _no_copies(_step: int) -> list[dict[str, Any]]:
    return []


class RunLog:
    """A log that writes the replicas' reports into the run directory and to the display."""

    def __init__(self, run_progress: RunProgress, writer: RunWriter, progress: Progress) -> None:
        self.run_progress = run_progress
        self.fetch_copies: Callable[[int], list[dict[str, Any]]] = _no_copies
        """Requests the replicas' copies of the lines of steps from the given one on."""
        self.scale_requests: ScaleRequests | None = None
        """Queue of requests for more or fewer replicas; None: the run cannot be scaled."""
        self.writer = writer
        self.progress = progress
        self.output = OutputLog(writer, progress.said)
        self.bytes_reported = 0
        """Number of bytes sent according to the lines, including steps that were done again."""
        self._warned: set[str] = set()

    def announce(self, sizes: Mapping[str, int], batch_size: int, *, resumed: bool, **members: int) -> None:
        """Record that the run has begun.

        Args:
            sizes: sizes that the display shows, with `samples` and `total_steps`.
            batch_size: samples of a batch.
            resumed: True if the run continues an earlier one.
            members: number of processes of each role.
        """
        self.run_progress.total_steps = sizes["total_steps"]
        self.run_progress.goodput.begin(self.run_progress.now_s())
        self.progress.set_total(sizes["total_steps"])
        if sizes["samples"] < batch_size:
            self.progress.warn(
                f"the data has {sizes['samples']} samples, fewer than one batch of {batch_size}: each step uses all of "
                "them."
            )
        facts: dict[str, Any] = {**sizes, **members}
        self.writer.event("resumed" if resumed else "started", **facts)

    def record(self, lines: list[dict[str, Any]], *, met_at: int = 0) -> None:
        """Write lines and events as they come from the replicas, each line once.

        Args:
            lines: lines and events, in order.
            met_at: step at which the replicas have met; the line of a later step is a sign of a recovery.
        """
        news: list[dict[str, Any]] = []
        try:
            for line in lines:
                if "event" in line:
                    self.writer.metrics(news)
                    news = []
                    self._on_event(line)
                elif self.run_progress.is_news(line):
                    news.append(line)
                    self._show(line, met_at)
        finally:  # a copy of these lines would be ignored later
            self.writer.metrics(news)
        if lines:
            self.writer.flush()
            # One less: the validation of the last step may still come.
            self.run_progress.written_step = max(0, self.run_progress.last_step - 1)

    def _show(self, line: Mapping[str, Any], met_at: int) -> None:
        """Do everything with a line except writing it."""
        self.bytes_reported += line.get("bytes_sent", 0)
        self.progress.update(line)
        self._look_at(line)
        is_recovered = int(line["step"]) > met_at and self.run_progress.is_recovered_by(line)
        if "split" not in line:
            self.run_progress.goodput.complete(float(line["time_s"]), after_loss=is_recovered)
        if is_recovered:
            self._on_recovered(line)

    def _look_at(self, line: Mapping[str, Any]) -> None:
        """Warn once if a loss is not finite: files hold null there, and the run goes on."""
        loss = line.get("loss")
        if loss is None or math.isfinite(loss):
            return
        what = "validation loss" if "split" in line else "loss"
        advice = "lower train.optimizer.lr, or set train.grad_clip"
        self.warn(what, f"the {what} of step {line['step']} is {loss}; {advice}")

    def warn(self, what: str, text: str) -> None:
        """Write a warning to the run's events and the display, once per `what`."""
        if what not in self._warned:
            self._warned.add(what)
            self.writer.event("warning", text=text)
            self.progress.warn(text)

    def _on_event(self, line: Mapping[str, Any]) -> None:
        step = int(line["step"])
        if line["event"] == "agreed":
            if self.run_progress.go_back_to(step):
                self.run_progress.goodput.go_back(self.writer.truncate_after(step))
            self.record(list(line["lines"]), met_at=step)
            if step > 0:
                # Rank 0 may have died with lines that were not fetched; every replica keeps a copy of the last ones. It
                # may have done further steps by now.
                self.record(self.fetch_copies(self.run_progress.last_step), met_at=step)
        elif line["event"] == "warning":
            self.warn(line["text"], line["text"])
        elif line["event"] == "checkpoint_saved":
            self.run_progress.checkpoints.append(step)
            self.writer.event("checkpoint_saved", step=step)

    def _on_recovered(self, line: Mapping[str, Any]) -> None:
        assert self.run_progress.lost_at_s is not None
        seconds = round(float(line["time_s"]) - self.run_progress.lost_at_s, 3)
        self.run_progress.lost_at_s = None
        self.writer.event("recovered", step=int(line["step"]), seconds=seconds)
        self.progress.event(f"recovered at step {line['step']} after {seconds:.1f} s")
