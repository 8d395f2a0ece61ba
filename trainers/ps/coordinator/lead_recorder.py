"""The lead server's records of a run: metric lines, the position, and how the run ended."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.loop.position import Position
from orchestray.trainers.optim.schedules import lr_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestray.platform.run.recorder import Recorder
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.ps.coordinator.coordinator import Coordinator
    from orchestray.trainers.ps.protocol.plan import CoordinatorSettings
    from orchestray.trainers.ps.protocol.requests import Traffic
    from orchestray.trainers.ps.server.server import ShardServer


class LeadRecorder:
    """A listener of the coordinator that records the run; `note` is called in the order of the events."""

    def __init__(
        self, settings: ReplicaSettings, plan: CoordinatorSettings, position: Mapping[str, Any], recorder: Recorder
    ) -> None:
        """
        Args:
            settings: settings of the run.
            plan: settings of the coordinator.
            position: position to continue from; empty at the start of a run.
            recorder: receives the metric lines.
        """
        self.position = Position(**position)
        self.position.begin_attempt(settings)
        if settings.best is None:
            self.position.best_checkpoint = None
        self.written_step = 0
        """Last step whose metric lines are known to be on disk; a checkpoint carries the later lines."""
        self._settings = settings
        self._plan = plan
        self._recorder = recorder
        self._first_step = self.position.step
        self._bytes_before = self.position.bytes_sent, self.position.bytes_dense
        """Bytes that earlier processes of the run sent; the present processes count their own bytes exactly."""
        self._began_s = self._last_s = time.perf_counter()
        self._started_at = time.time()
        self._timer: threading.Timer | None = None
        self._dropped = 0

    def open(self, server: ShardServer, started_at: float) -> None:
        """Begin or continue the run.

        Args:
            server: lead server, which gets the request to stop at the time limit.
            started_at: wall-clock time from which the run's time counts, in seconds.
        """
        self._started_at = started_at
        limit_s = self._settings.time_limit_s
        if limit_s is not None:
            left_s = max(0.0, started_at + limit_s - time.time())
            self._timer = threading.Timer(left_s, lambda: server.request_stop("time_limit_s", validate=True))
            self._timer.daemon = True
            self._timer.start()

    def go_on_from(self, coordinator: Coordinator, events: Iterable[Mapping[str, Any]] = ()) -> None:
        """Continue from a coordinator whose state may come from another server.

        Args:
            coordinator: coordinator that the run continues with.
            events: events that the coordinator has sent since the last record, where they are known.
        """
        for event in events:
            self.note(event)
        position = self.position
        position.best_checkpoint = coordinator.best
        if position.step != coordinator.step:
            position.step = coordinator.step
            position.epoch = max(0, coordinator.step - 1) // self._plan.steps_per_epoch
            position.validation = coordinator.validation

    def close(self) -> None:
        """Stop the timer of the time limit."""
        if self._timer is not None:
            self._timer.cancel()

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the run that the display shows."""
        return {
            "samples": self._plan.num_samples,
            "total_steps": self._plan.last_step,
            "steps_per_epoch": self._plan.steps_per_epoch,
        }

    def is_reached(self, means: Mapping[str, float]) -> bool:
        """Return True if a run with these validation means has reached its goal (`train.until`).

        Raises:
            ConfigError: the goal names a metric that the task does not have.
        """
        until = self._settings.until
        return until is not None and until.reached(means)

    def note(self, event: Mapping[str, Any]) -> None:
        """Record an event that the server's state machine sends to its listener."""
        kind = event["event"]
        if kind == "step":
            self._on_step(event)
        elif kind == "validated":
            self._on_validated(event["means"], event["best"])
        elif kind == "saved" and event["counts"]:
            self._recorder.record({"event": "checkpoint_saved", "step": self.position.step})
        elif kind == "dropped":
            self._dropped += len(event["workers"])

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what a checkpoint's state holds besides the tensors."""
        lines = [line for line in self._recorder.since(self.written_step) if "event" not in line]
        return {
            **self.position.state(),
            "num_replicas": self._settings.layout.data,
            "seconds": time.time() - self._started_at,
            "lines": lines,
        }

    def outcome(self, ended: str, staleness: Mapping[int, int]) -> Outcome:
        """Return how the run ended. Its byte counts are those of earlier processes only."""
        position, plan = self.position, self._plan
        sent, dense = self._bytes_before
        mean = position.epoch_loss_sum / max(1, position.epoch_samples)
        return Outcome(
            ended=ended,
            step=position.step,
            epochs=round(position.step / plan.steps_per_epoch, 6),
            final={"train": {"loss": mean} if position.step else None, "validation": position.validation},
            bytes_sent=sent,
            bytes_dense=dense,
            samples=plan.samples_through(position.step) - plan.samples_through(self._first_step),
            training_s=self._last_s - self._began_s,
            staleness=dict(staleness) if plan.bound != 0 else {},
            summary={**({"dropped_copies": self._dropped} if self._dropped else {}), **position.summary()},
        )

    def _on_step(self, event: Mapping[str, Any]) -> None:
        now_s, position = time.perf_counter(), self.position
        position.complete(event["step"], event["epoch"], event["batch_samples"], event["loss"])
        settings = self._settings
        lr = lr_at(settings.lr_schedule, settings.optimizer["lr"], position.step, self._plan.last_step)
        samples_per_s = event["batch_samples"] / max(now_s - self._last_s, 1e-9)
        line = self._line(loss=event["loss"], lr=lr, samples_per_s=samples_per_s)
        if self._plan.bound != 0:
            line["staleness"] = event["staleness"]
        line |= self._exchanged(event.get("traffic"))
        self._last_s = now_s
        self._recorder.record(line)

    def _exchanged(self, traffic: Traffic | None) -> dict[str, Any]:
        """Return the bytes and the compression error of the step, as far as the lead knew them then."""
        if traffic is None:
            return {}
        for text in traffic.warnings:
            self._recorder.record({"event": "warning", "step": self.position.step, "text": text})
        self.position.bytes_sent += traffic.bytes
        self.position.bytes_dense += traffic.bytes + traffic.saved
        errors = traffic.errors
        return {"bytes_sent": traffic.bytes, **({"compression_error": errors[0][1]} if errors else {})}

    def _on_validated(self, means: Mapping[str, float], best: dict[str, Any] | None) -> None:
        position = self.position
        position.best_checkpoint = best
        position.validation, position.validated_step = dict(means), position.step
        self._recorder.record(self._line(split="validation", **means))

    def _line(self, **values: Any) -> dict[str, Any]:
        time_s = round(time.time() - self._started_at, 6)
        return {"step": self.position.step, "epoch": self.position.epoch + 1, "time_s": time_s, **values}
