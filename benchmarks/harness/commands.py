"""Commands, ours and the peers', and the times seen from outside while they run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.benchmark import FOLDER, BenchmarkError

_SHOWN_CHARACTERS = 3000
_LOOK_S = 0.02


def script(name: str) -> str:
    """Return the path of a console script of this environment (`orchestray`, `ray`, `torchrun`)."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise BenchmarkError(f"this environment has no command {name!r}: install the package with its dependencies")
    return str(path)


def peer(name: str) -> str:
    """Return the path of a peer's script."""
    return str(FOLDER / "harness" / "peers" / f"{name}.py")


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


@dataclass
class Running:
    """A command under way."""

    process: subprocess.Popen[bytes]
    called_at: float
    """Wall-clock time just before it was started, seconds since the epoch."""
    output: Any
    began_at: float
    """Wall-clock time by which it was started. Times a run gives of its own count from the start of its process: added
    to this they are late by the few milliseconds that starting took, never early.
    """

    def text(self) -> str:
        self.output.flush()
        return Path(self.output.name).read_text(encoding="utf-8", errors="replace")[-_SHOWN_CHARACTERS:]

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise BenchmarkError(f"the command ended with status {self.process.returncode}:\n{self.text()}")

    def wait_until(self, look: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Look every 20 ms until there is something to see, and return it."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if seen := look():
                return seen
            self.check_alive()
            time.sleep(_LOOK_S)
        raise BenchmarkError(f"{what} did not happen within {timeout_s:g} s:\n{self.text()}")

    def wait(self, timeout_s: float, statuses: Sequence[int] = (0,)) -> float:
        """Wait for the end, and return its wall-clock time.

        Raises:
            BenchmarkError: it did not end in time, or not with one of `statuses`.
        """
        if not _ended_within(self.process, timeout_s):
            raise BenchmarkError(f"the command did not end within {timeout_s:g} s:\n{self.text()}")
        ended_at = time.time()
        status = self.process.wait()
        if status not in statuses:
            raise BenchmarkError(f"the command ended with status {status}:\n{self.text()}")
        return ended_at

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


def _ended_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the end itself: `Popen.wait` with a timeout would look only every 50 ms."""
    if process.poll() is not None:
        return True
    if not hasattr(os, "pidfd_open"):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        return process.poll() is not None
    descriptor = os.pidfd_open(process.pid)
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def running(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Start a command; at the end of the block what is left of it and its descendants is ended, by process id."""
    import psutil

    # A cluster that happens to run here is nobody's to measure on.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OMP_", "MKL_"))}
    settings = {**inherited, "PYTHONPATH": _python_path(), **(environment or {})}
    with tempfile.NamedTemporaryFile(prefix="orchestray-benchmark-", suffix=".log") as output:
        called_at = time.time()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=settings
        )
        began_at = time.time()
        family = {}
        try:
            yield Running(process, called_at, output, began_at)
            with contextlib.suppress(psutil.NoSuchProcess):
                family = {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        except BaseException:
            with contextlib.suppress(psutil.NoSuchProcess):
                family = {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
            raise
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            for child in family.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def run_command(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[float, float]:
    """Run a command to its end, and return the wall-clock times at which it was called and ended."""
    with running(command, environment) as under_way:
        ended_at = under_way.wait(timeout_s)
        return under_way.called_at, ended_at


def _python_path() -> str:
    """Return the path on which peers and workers find `harness.tasks`, however they are started."""
    return os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a .jsonl file; none if it is not there yet."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line]


def step_lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of training steps in a run directory's metrics."""
    return [line for line in read_lines(run / "metrics.jsonl") if "split" not in line]
