"""Commands as jobs on a Ray cluster: sent, followed, listed and stopped through the cluster's job server.

Each job carries the command's files (see `files`) and the source of this package, about a megabyte. The cluster thus
needs the packages that orchestray depends on, but not orchestray, and both sides run the same version of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError

from orchestray.platform.errors import ClusterError, ConfigError
from orchestray.platform.jobs.address import ask, check_answers, headers, job_address, token_refused, use_token

DEFAULT_RUNS_DIR = "orchestray-runs"
"""Directory of runs, relative to the home directory of Ray's user: a job's own directory is deleted after it."""

_POLL_S = 0.5
_REQUEST_TIMEOUT_S = 60.0
_SILENCE_S = 20.0
_STOP_GRACE_S = 120
_STOP_TIMEOUT_S = 180.0
_NUM_IDS_SHOWN = 10
_RAY_LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
_LINES_OF_RAY = (
    re.compile(r"[\d-]+ [\d:,]+\s+INFO job_manager\.py:\d+ -- Runtime env is setting up\."),
    re.compile(r"Running entrypoint for job \S+: "),
)
_T = TypeVar("_T")
_COMMAND_KEY = "orchestray_command"

# A bare `python` is the first one on the PATH of the shell that ran `ray start`, often one without Ray. The right one
# is that of Ray's workers; the shell's parent is such a worker, and has Ray's library mapped.
_FIND_PYTHON = (
    r"p=$(sed -n 's#^[^/]*\(/.*\)/lib[^/]*/python[^/]*/site-packages/ray/_raylet\.so$#\1/bin/python#p' "
    r'/proc/$PPID/maps 2>/dev/null | head -n 1); [ -x "$p" ] || p=python'
)


def _in_daemon(call: Callable[[], _T]) -> Future[_T]:
    """Start `call` in a daemon thread, which does not delay the end of the process, and return its future."""
    future: Future[_T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass(frozen=True)
class Job:
    """A submitted job.

    `status` is pending, running, succeeded, failed or stopped. `exit_status` is that of its command, None if that has
    not ended or never began. `seconds` is the time the job took, or has taken so far.
    """

    id: str
    status: str
    command: str
    started_at_s: float | None
    seconds: float | None
    exit_status: int | None
    message: str

    @property
    def ended(self) -> bool:
        """True if the job has ended."""
        return self.status in {"succeeded", "failed", "stopped"}


def entrypoint(words: Sequence[str], runs_dir: str | None) -> str:
    """Return the shell command that runs `orchestray` with these words on the cluster.

    Args:
        words: the command and its arguments.
        runs_dir: directory of its runs, None if it has none; a relative one starts at the home directory there.
    """
    line = f'{_FIND_PYTHON}; exec "$p" -m orchestray.cli.app {shlex.join(words)}'
    if runs_dir is None:
        return line
    home = "" if runs_dir.startswith("/") else '"$HOME"/'
    return f"{line} --runs-dir {home}{shlex.quote(runs_dir)}"


class JobServer:
    """A client of a cluster's job server.

    Every method raises ClusterError if the server does not answer or refuses the token.
    """

    def __init__(self, address: str | None) -> None:
        self.address = job_address(address)
        use_token()
        self.ray_version = check_answers(self.address)

    def submit(self, command: str, entrypoint: str, *, package: Path, working_dir: Path | None) -> str:
        """Upload the files, start the job, and return its id: the one request that Ray's own client makes."""
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient
        from requests.exceptions import RequestException

        for logger in _RAY_LOGGERS:
            logging.getLogger(logger).setLevel(logging.ERROR)
        runtime_env: dict[str, Any] = {
            "py_modules": [str(package)],
            # Jobs are stopped as with Ctrl-C, with time to save a checkpoint. Ray's default is SIGTERM and three
            # seconds, and `ray.init` replaces any other handler for SIGTERM with its own.
            "env_vars": {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_GRACE_S)},
        }
        if working_dir is not None:
            runtime_env["working_dir"] = str(working_dir)
        try:
            client = JobSubmissionClient(self.address)
            return str(
                client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env, metadata={_COMMAND_KEY: command})
            )
        except ValueError as error:  # usually because the files are too large
            raise ConfigError(f"The files cannot be sent with the job: {error}") from error
        except AuthenticationError as error:
            raise ClusterError(token_refused(self.address)) from error
        except (RequestException, ConnectionError) as error:
            raise ClusterError(self._silent()) from error
        except RuntimeError as error:
            raise ClusterError(self._refused(str(error))) from error

    def jobs(self) -> list[Job]:
        """Return every submitted job the cluster knows, the latest first."""
        found = [_job(details) for details in self._ask("jobs/") if details.get("submission_id")]
        return sorted(found, key=lambda job: job.started_at_s or 0, reverse=True)

    def job(self, job_id: str) -> Job:
        """Return one job.

        Raises:
            ConfigError: no job has that id; the message lists the known ids.
        """
        jobs = self.jobs()
        for job in jobs:
            if job.id == job_id:
                return job
        known = ", ".join(job.id for job in jobs[:_NUM_IDS_SHOWN]) + (", ..." if len(jobs) > _NUM_IDS_SHOWN else "")
        raise ConfigError(f"There is no job {job_id!r} at {self.address}; there are {known or 'none'}.")

    def logs(self, job_id: str) -> str:
        """Return everything that the job has written so far."""
        pieces: list[str] = []
        body = Body(pieces.append)
        body.write(self._whole_log(job_id))
        body.end()
        return "".join(pieces)

    def _whole_log(self, job_id: str) -> str:
        return str(self._ask(f"jobs/{job_id}/logs")["logs"])

    def stop(self, job_id: str) -> Job:
        """Ask a job to stop, as Ctrl-C would, and wait until it has ended."""
        self._ask(f"jobs/{job_id}/stop", method="POST")
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while not (job := self._poll(job_id)).ended:
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    f"Job {job_id} was asked to stop and still runs after {_STOP_TIMEOUT_S:g} s. "
                    f"`orchestray jobs logs {job_id}` shows what it does."
                )
            time.sleep(_POLL_S)
        return job

    def follow(self, job_id: str, write: Callable[[str], None]) -> Job:
        """Pass the job's log to `write` as it grows, from its beginning, until the job has ended; return the job."""
        body = Body(write)
        try:
            # In a daemon thread: Ctrl-C is answered at once, even while the server is silent.
            return _in_daemon(lambda: asyncio.run(self._follow(job_id, Shown(body.write)))).result()
        finally:
            body.end()

    async def _follow(self, job_id: str, shown: Shown) -> Job:
        tail = asyncio.create_task(self._tail(job_id, shown))
        answered_at_s = time.monotonic()
        try:
            while True:
                await asyncio.wait({tail}, timeout=_POLL_S)
                try:
                    job = await asyncio.wrap_future(_in_daemon(lambda: self._poll(job_id)))
                    answered_at_s = time.monotonic()
                except ClusterError as error:
                    if time.monotonic() - answered_at_s > _SILENCE_S:
                        raise ClusterError(f"{error} Job {job_id} may be going on.") from error
                    continue
                if job.ended:
                    break
                if tail.done():  # a broken connection; text that was already shown is not shown again
                    tail = asyncio.create_task(self._tail(job_id, shown))
        finally:
            tail.cancel()
            await asyncio.gather(tail, return_exceptions=True)
        # The tail lags by seconds. The whole log has the rest, unless the node that holds it is gone.
        with contextlib.suppress(ClusterError):
            shown.show_from_start(await asyncio.wrap_future(_in_daemon(lambda: self._whole_log(job_id))))
        return job

    async def _tail(self, job_id: str, shown: Shown) -> None:
        from aiohttp import ClientError, ClientSession, WSMsgType

        position = 0
        try:
            async with ClientSession(headers=headers()) as session:
                async for message in await session.ws_connect(f"{self.address}/api/jobs/{job_id}/logs/tail"):
                    if message.type == WSMsgType.TEXT:
                        shown.show(message.data, position)
                        position += len(message.data)
        except (OSError, ClientError):
            pass  # `_follow` checks the job, and starts to tail again
        await asyncio.sleep(_POLL_S)

    def _poll(self, job_id: str) -> Job:
        return _job(self._ask(f"jobs/{job_id}"))

    def _ask(self, path: str, *, method: str = "GET") -> Any:
        """Return the server's answer; errors are ClusterErrors with a readable sentence."""
        try:
            return ask(self.address, path, method=method, timeout_s=_REQUEST_TIMEOUT_S)
        except HTTPError as error:
            if error.code in {401, 403}:
                raise ClusterError(token_refused(self.address)) from error
            raise ClusterError(self._refused(error.read().decode(errors="replace") or str(error))) from error
        except (OSError, HTTPException, ValueError) as error:
            raise ClusterError(self._silent()) from error

    def _silent(self) -> str:
        return f"The job server at {self.address} no longer answers."

    def _refused(self, text: str) -> str:
        lines = [line for line in text.strip().splitlines() if line.strip()]
        return f"The job server at {self.address} refused: {lines[-1] if lines else 'it does not say why'}"


class Shown:
    """The part of a log that was already shown, so that a second reading continues where the first broke off."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._num_characters = 0

    def show(self, text: str, position: int) -> None:
        """Show the new part of a piece of the log that begins at `position` characters."""
        fresh = text[max(0, self._num_characters - position) :]
        if fresh:
            self._write(fresh)
            self._num_characters = position + len(text)

    def show_from_start(self, text: str) -> None:
        self.show(text, 0)


class Body:
    """A filter that passes on a log without Ray's first lines, which are about the job, not written by it."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._head: str | None = ""
        """Text received so far that may yet be a line of Ray's; None once the job's own first line has come."""

    def write(self, text: str) -> None:
        """Pass on the next piece of the log; a first line is held until it is complete."""
        if self._head is None:
            self._write(text)
            return
        self._head += text
        while "\n" in self._head:
            line, _, rest = self._head.partition("\n")
            if not any(pattern.match(line) for pattern in _LINES_OF_RAY):
                self.end()
                return
            self._head = rest

    def end(self) -> None:
        """Pass on the text that was held."""
        held, self._head = self._head, None
        if held:
            self._write(held)


def _job(details: Mapping[str, Any]) -> Job:
    status = details["status"].lower()
    started_at_s = details["start_time"] / 1000 if details.get("start_time") else None
    ended_at_s = details["end_time"] / 1000 if details.get("end_time") else time.time()
    return Job(
        id=details.get("submission_id") or "",
        status=status,
        command=(details.get("metadata") or {}).get(_COMMAND_KEY) or details["entrypoint"],
        started_at_s=started_at_s,
        seconds=max(0.0, ended_at_s - started_at_s) if started_at_s else None,
        exit_status=exit_status_of(status, details.get("driver_exit_code")),
        message=(details.get("message") or "").strip(),
    )


def exit_status_of(status: str, driver_exit_code: int | None) -> int | None:
    """Return the command's exit status, 128 + signal if a signal ended it; None if there is none (yet)."""
    if status == "stopped":
        return 130
    if status == "succeeded":
        return 0
    if driver_exit_code is None:
        return None
    return driver_exit_code if driver_exit_code >= 0 else 128 - driver_exit_code
