"""The command line as a user types it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from support.patience import PATIENCE_S

COMMAND = [sys.executable, "-m", "orchestray.platform.cli.app"]
TIMEOUT_S = PATIENCE_S


def outside() -> dict[str, str]:
    """The environment of this process, but for what its own Ray, if it has one, has put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def orchestray(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `orchestray ARGUMENTS...` to its end, in a terminal-less process."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env={**outside(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def orchestray_here(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """As `orchestray`, in this process and on the Ray it has (the fixture `cluster`): nothing has to be started.

    What it does not show is how a process begins and ends. An exception that a user would see is one here.
    """
    from orchestray.platform.cli import app
    from orchestray.platform.cli.commands import search, train

    command, status = [*map(str, arguments)], 0
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["orchestray", *command]),
        mock.patch.object(train, "leave_cluster"),  # the next one goes on with it
        mock.patch.object(search, "leave_cluster"),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            app.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(command, status, stdout.getvalue(), stderr.getvalue())


class Running:
    """A run of the command line that is under way."""

    def __init__(
        self, arguments: Sequence[str | Path], run_path: Path, cwd: Path | None = None, *, own_group: bool = False
    ) -> None:
        self.run_path = run_path
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            cwd=cwd,
            env=outside(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0 if own_group else None,
        )

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait until `condition` is true; returns its value. Fails if the process ends or time is up before."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            if value := condition():
                return value
            if self.process.poll() is not None:
                raise AssertionError(
                    f"ended with {self.process.returncode} before {what}: {self.process.communicate()}"
                )
            time.sleep(0.02)
        raise AssertionError(f"{what} never happened")

    def steps(self) -> int:
        """The last step in metrics.jsonl."""
        lines = read_lines(self.run_path / "metrics.jsonl")
        return int(lines[-1]["step"]) if lines else 0

    def actors(self, role: str = "worker") -> dict[int, int]:
        """Process id by rank, as actors.json says now."""
        path = self.run_path / "actors.json"
        actors = json.loads(path.read_text()) if path.exists() else []
        return {actor["rank"]: actor["pid"] for actor in actors if actor["role"] == role}

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.run_path / "events.jsonl") if line["event"] == name]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, stdout, stderr


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON lines file that may still grow."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
