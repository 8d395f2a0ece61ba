"""What a driver has seen of a run, and how it is written down: each line once, whatever was lost in between."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestray.platform.run.progress import Progress
    from orchestray.platform.run.scaling import ScaleDesk
    from orchestray.platform.run.writer import RunWriter


@dataclass
class Story:
    """What the driver has seen of a run so far."""

    started_at: float
    last_step: int = 0
    """Of the metric lines written."""
    last_validated_step: int = 0
    written_step: int = 0
    """Up to here they have reached the operating system: a kill of this process cannot lose them."""
    restarts: int = 0
    first_step_s: float | None = None
    lost_at_s: float | None = None
    """When the members now being replaced were lost, in seconds of the run."""
    total_steps: int | None = None
    checkpoints: list[int] = field(default_factory=list)

    def now_s(self) -> float:
        return time.time() - self.started_at

    def is_news(self, line: Mapping[str, Any]) -> bool:
        """Whether a metric line was not seen before; copies of lines come after a loss."""
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
        """Whether this is the first step after a loss; lines of steps before it may come in later."""
        return self.lost_at_s is not None and "split" not in line and float(line["time_s"]) > self.lost_at_s

    def go_back_to(self, step: int) -> bool:
        """Forget what was seen of later steps, which will be done again; returns whether there was any."""
        later = max(self.last_step, self.last_validated_step) > step
        self.last_step, self.last_validated_step = min(self.last_step, step), min(self.last_validated_step, step)
        self.written_step = min(self.written_step, step)
        return later


def _no_copies(_step: int) -> list[dict[str, Any]]:
    return []


class Book:
    """Writes what the replicas report into the run directory and onto the display."""

    def __init__(self, story: Story, writer: RunWriter, progress: Progress) -> None:
        self.story = story
        self.fetch_copies: Callable[[int], list[dict[str, Any]]] = _no_copies
        """Asks the replicas for their copies of the lines of steps from the given one on."""
        self.desk: ScaleDesk | None = None
        """Where it is asked for more or fewer replicas; None: nobody can."""
        self.writer = writer
        self.progress = progress
        self.bytes_told = 0
        """What the lines say was sent, those of steps that were done again, too."""
        self._warned: set[str] = set()

    def record(self, lines: list[dict[str, Any]], *, copies: bool = False) -> None:
        """Write down lines and events as they come from the replicas, each line once.

        Args:
            copies: the lines are of steps before the replicas met: they are no sign of a recovery.
        """
        news: list[dict[str, Any]] = []
        try:
            for line in lines:
                if "event" in line:
                    self.writer.metrics(news)
                    news = []
                    self._on_event(line)
                elif self.story.is_news(line):
                    news.append(line)
                    self._show(line, copies=copies)
        finally:  # no copy would be news any more
            self.writer.metrics(news)
        if lines:
            self.writer.flush()
            # One less: the validation of the last step may still come.
            self.story.written_step = max(0, self.story.last_step - 1)

    def _show(self, line: Mapping[str, Any], *, copies: bool) -> None:
        """All that is done with a line but writing it."""
        self.bytes_told += line.get("bytes_sent", 0)
        self.progress.update(line)
        self._look_at(line)
        if not copies and self.story.is_recovered_by(line):
            self._on_recovered(line)

    def _look_at(self, line: Mapping[str, Any]) -> None:
        """Say, once, that a loss is none any more: files hold null there, and a run goes on to its end."""
        loss = line.get("loss")
        if loss is None or math.isfinite(loss):
            return
        what = "validation loss" if "split" in line else "loss"
        advice = "lower train.optimizer.lr, or set train.grad_clip"
        self._warn(what, f"the {what} of step {line['step']} is {loss}; {advice}")

    def _warn(self, what: str, text: str) -> None:
        """Tell the run's events and the user, once of each thing."""
        if what not in self._warned:
            self._warned.add(what)
            self.writer.event("warning", text=text)
            self.progress.event(f"warning: {text}")

    def _on_event(self, line: Mapping[str, Any]) -> None:
        step = int(line["step"])
        if line["event"] == "agreed":
            if self.story.go_back_to(step):
                self.writer.truncate_after(step)
            self.record(list(line["lines"]), copies=True)
            if step > 0:
                # Rank 0 may have died with lines nobody had fetched; every replica keeps a copy of the last ones.
                self.record(self.fetch_copies(self.story.last_step), copies=True)
        elif line["event"] == "warning":
            self._warn(line["text"], line["text"])
        elif line["event"] == "checkpoint_saved":
            self.story.checkpoints.append(step)
            self.writer.event("checkpoint_saved", step=step)

    def _on_recovered(self, line: Mapping[str, Any]) -> None:
        assert self.story.lost_at_s is not None
        seconds = round(float(line["time_s"]) - self.story.lost_at_s, 3)
        self.story.lost_at_s = None
        self.writer.event("recovered", step=int(line["step"]), seconds=seconds)
        self.progress.event(f"recovered at step {line['step']} after {seconds:.1f} s")
