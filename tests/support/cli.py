"""The command line as a user types it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import psutil

from orchestray.platform.actors.pool import make_room
from orchestray.platform.cluster.cluster import Cluster
from support.patience import PATIENCE_S

COMMAND = [sys.executable, "-m", "orchestray.cli.app"]
TIMEOUT_S = PATIENCE_S


def outside() -> dict[str, str]:
    """Return the environment of this process without the variables that its own Ray, if it has one, has set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def python_path(*folders: str | Path) -> str:
    """Return the PYTHONPATH of a process that imports from these folders, and otherwise what this one imports."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def beside(cluster: Cluster) -> dict[str, str]:
    """Return what has a process of its own train on the Ray of this one, in which there is room now."""
    make_room(cluster)
    token = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
    token.setdefault("RAY_AUTH_TOKEN_PATH", str(Path.home() / ".ray" / "auth_token"))
    # A script that uses Ray alone does not look for a token by itself.
    return {**token, "RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "token"}


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
    """Run `orchestray` in this process and on the Ray it has (the fixture `cluster`): nothing has to be started.

    This does not show how a process begins and ends. An exception that a user would see is one here.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    status = typed_here(["orchestray", *map(str, arguments)], stdout, stderr)
    return subprocess.CompletedProcess([*map(str, arguments)], status, stdout.getvalue(), stderr.getvalue())


def typed_here(command: Sequence[str], stdout: TextIO, stderr: TextIO) -> int:
    """Do in this process what `orchestray ...` or `python SCRIPT ...` would do; return the exit status."""
    from orchestray.cli import app, search, serve, train

    program, *arguments = command
    try:
        with (
            mock.patch.object(sys, "argv", [*command] if program == "orchestray" else arguments),
            mock.patch.object(train, "leave_cluster"),  # the next one goes on with it
            mock.patch.object(search, "leave_cluster"),
            mock.patch.object(serve, "leave_cluster"),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            if program == "orchestray":
                app.main()
            else:
                with mock.patch.object(sys, "path", [str(Path(arguments[0]).parent.resolve()), *sys.path]):
                    runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


class Running:
    """A run of the command line that is under way."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        run_path: Path,
        cwd: Path | None = None,
        *,
        own_group: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        self.run_path = run_path
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            cwd=cwd,
            env={**outside(), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0 if own_group else None,
        )

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait until `condition` is true, and return its value; fail if the process ends or time is up before."""
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
        """Return the last step in metrics.jsonl."""
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
        """Wait for the end, and return the exit status, stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, stdout, stderr


def template_of(running: Running) -> psutil.Process:
    """Return the process of a run that its workers are forked from."""
    (template,) = [
        child
        for child in psutil.Process(running.process.pid).children()
        if any(part.endswith("worker_template.py") for part in child.cmdline())
    ]
    return template


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSON lines file that may still grow."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
