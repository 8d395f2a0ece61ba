"""A training in a thread of the test's process: on a cluster that is warm it starts at once."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import orchestray
from orchestray.platform.run.checkpoint import load_model_tensors
from support.cli import TIMEOUT_S, read_lines


class UnderWay:
    """A training that is under way, and its run directory."""

    def __init__(self, source: Any, runs: Path, overrides: Sequence[str] = (), *, name: str) -> None:
        self.path = runs / name
        self._error: BaseException | None = None

        def train() -> None:
            try:
                orchestray.train(source, overrides=overrides, runs_dir=runs, name=name)
            except BaseException as error:  # noqa: BLE001 - raised by `finish`
                self._error = error

        self._thread = threading.Thread(target=train, daemon=True)
        self._thread.start()

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait until `condition` is true, and return its value; fail if the training ends or time is up before."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            if value := condition():
                return value
            if not self._thread.is_alive():
                raise AssertionError(f"ended before {what}: {self._error!r}")
            time.sleep(0.02)
        raise AssertionError(f"{what} never happened")

    def kill(self, rank: int, role: str = "worker") -> int:
        """Kill a listed process by SIGKILL; return its id."""
        pid = self.actors(role)[rank]
        os.kill(pid, signal.SIGKILL)
        return pid

    def stop(self, rank: int) -> None:
        """Stop a worker by SIGSTOP; return once none of its threads goes on, which may take a moment."""
        pid = self.actors()[rank]
        os.kill(pid, signal.SIGSTOP)
        self.until("stopped", lambda: all(thread.status() == psutil.STATUS_STOPPED for thread in _threads(pid)))

    def finish(self) -> None:
        """Wait for the end; raise what the training raised."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def steps(self) -> int:
        lines = read_lines(self.path / "metrics.jsonl")
        return int(lines[-1]["step"]) if lines else 0

    def actors(self, role: str = "worker") -> dict[int, int]:
        """Process id by rank, as actors.json says now."""
        path = self.path / "actors.json"
        actors = json.loads(path.read_text()) if path.exists() else []
        return {actor["rank"]: actor["pid"] for actor in actors if actor["role"] == role}

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.path / "events.jsonl") if name in (None, line["event"])]

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.path / "result.json").read_text())
        return result


def _threads(pid: int) -> list[psutil.Process]:
    """Return the threads of a process, of which each has a state of its own on Linux."""
    return [psutil.Process(thread.id) for thread in psutil.Process(pid).threads()]


def losses(run: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of every step in metrics.jsonl."""
    return [(line["step"], line["loss"]) for line in read_lines(run / "metrics.jsonl") if "split" not in line]


def validations(run: Path) -> list[dict[str, Any]]:
    """Return the results of the validations, by step."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if "split" in line]
    return [{key: value for key, value in line.items() if key != "time_s"} for line in lines]


def assert_same_run(left: Path, right: Path) -> None:
    """Assert the same weights and buffers, losses and validations, to the last bit."""
    one, two = load_model_tensors(left / "model"), load_model_tensors(right / "model")
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
    assert losses(left) == losses(right)
    assert validations(left) == validations(right)
