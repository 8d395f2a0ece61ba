"""What the lead server writes down of a run: metric lines, where it is, how it ended."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from orchestray.trainers.replica.outcome import Outcome
from orchestray.trainers.replica.standing import Position
from orchestray.trainers.schedules import lr_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestray.platform.run.recorder import Recorder
    from orchestray.trainers.central.ledger import Ledger
    from orchestray.trainers.central.plan import LedgerSettings
    from orchestray.trainers.central.server import ShardServer
    from orchestray.trainers.replica.settings import ReplicaSettings


class Minutes:
    """Listens to the ledger. `note` is called in the order of what happens, while the server is locked."""

    def __init__(
        self, settings: ReplicaSettings, plan: LedgerSettings, position: Mapping[str, Any], recorder: Recorder
    ) -> None:
        """
        Args:
            settings: of the run.
            plan: of the ledger.
            position: to go on from; empty at the start.
            recorder: where lines go.
        """
        self.position = Position(**position)
        if self.position.stopped_by == "time_limit_s":
            self.position.stopped_by = None
        self.written_step = 0
        """Up to here the metric lines are known to be on disk; a checkpoint carries the later ones."""
        self._settings = settings
        self._plan = plan
        self._recorder = recorder
        self._first_step = self.position.step
        self._bytes_before = self.position.bytes_sent, self.position.bytes_dense
        """Those of earlier processes: what these send they count themselves, to the last byte."""
        self._began_s = self._last_s = time.perf_counter()
        self._started_at = time.time()
        self._timer: threading.Timer | None = None
        self._server: ShardServer | None = None
        self._dropped = 0

    def open(self, server: ShardServer, started_at: float) -> None:
        """The run begins, or goes on; its time counts from `started_at` (wall clock)."""
        self._server, self._started_at = server, started_at
        limit_s = self._settings.time_limit_s
        if limit_s is not None:
            left_s = max(0.0, started_at + limit_s - time.time())
            self._timer = threading.Timer(left_s, lambda: server.request_stop("time_limit_s", validate=True))
            self._timer.daemon = True
            self._timer.start()

    def go_on_from(self, ledger: Ledger, events: Iterable[Mapping[str, Any]] = ()) -> None:
        """The ledger may have come from another server, which noted what led to it; `events` are what it said of that,
        where this is known.
        """
        for event in events:
            self.note(event)
        position = self.position
        if position.step != ledger.step:
            position.step = ledger.step
            position.epoch = max(0, ledger.step - 1) // self._plan.steps_per_epoch
            position.validation = ledger.validation

    def close(self) -> None:
        """Nothing more is noted."""
        if self._timer is not None:
            self._timer.cancel()

    def sizes(self) -> dict[str, int]:
        """For the display."""
        return {
            "samples": self._plan.num_samples,
            "total_steps": self._plan.last_step,
            "steps_per_epoch": self._plan.steps_per_epoch,
        }

    def is_reached(self, means: Mapping[str, float]) -> bool:
        """Whether a run with this validation has come to its goal.

        Raises:
            ConfigError: the goal is of a metric that the task has not.
        """
        until = self._settings.until
        return until is not None and until.reached(means)

    def note(self, event: Mapping[str, Any]) -> None:
        """What the server's machine tells its listener."""
        kind = event["event"]
        if kind == "step":
            self._on_step(event)
        elif kind == "validated":
            self._on_validated(event["means"])
        elif kind == "saved" and event["counts"]:
            self._recorder.record({"event": "checkpoint_saved", "step": self.position.step})
        elif kind == "dropped":
            self._dropped += len(event["workers"])

    def told(self) -> dict[str, Any]:
        """What a checkpoint's state holds beside the tensors."""
        lines = [line for line in self._recorder.since(self.written_step) if "event" not in line]
        return {
            "position": dict(vars(self.position)),
            "num_replicas": self._settings.layout.data,
            "seconds": time.time() - self._started_at,
            "lines": lines,
        }

    def outcome(self, ended: str, staleness: Mapping[int, int]) -> Outcome:
        """How the run ended; of the bytes, those before this attempt."""
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
            told={"dropped_copies": self._dropped} if self._dropped else {},
        )

    def _on_step(self, event: Mapping[str, Any]) -> None:
        now_s, position = time.perf_counter(), self.position
        if event["epoch"] != position.epoch:
            position.epoch, position.epoch_loss_sum, position.epoch_samples = event["epoch"], 0.0, 0
        position.step = event["step"]
        position.epoch_loss_sum += event["loss"] * event["batch_samples"]
        position.epoch_samples += event["batch_samples"]
        line = self._line(loss=event["loss"], lr=self._lr(), samples_per_s=self._rate(event["batch_samples"], now_s))
        if self._plan.bound != 0:
            line["staleness"] = event["staleness"]
        line |= self._exchanged()
        self._last_s = now_s
        self._recorder.record(line)

    def _exchanged(self) -> dict[str, Any]:
        """What the exchange has to say of the step: as far as the lead knows by now."""
        if self._server is None:
            return {}
        told = self._server.tally()
        for text in told["warnings"]:
            self._recorder.record({"event": "warning", "step": self.position.step, "text": text})
        self.position.bytes_sent += told["bytes"]
        self.position.bytes_dense += told["bytes"] + told["saved"]
        errors = told["errors"]
        return {"bytes_sent": told["bytes"], **({"compression_error": errors[0][1]} if errors else {})}

    def _on_validated(self, means: Mapping[str, float]) -> None:
        position = self.position
        position.validation, position.validated_step = dict(means), position.step
        self._recorder.record(self._line(split="validation", **means))

    def _line(self, **values: Any) -> dict[str, Any]:
        time_s = round(time.time() - self._started_at, 6)
        return {"step": self.position.step, "epoch": self.position.epoch + 1, "time_s": time_s, **values}

    def _lr(self) -> float:
        settings = self._settings
        return lr_at(settings.lr_schedule, settings.optimizer["lr"], self.position.step, self._plan.last_step)

    def _rate(self, samples: int, now_s: float) -> float:
        return samples / max(now_s - self._last_s, 1e-9)
