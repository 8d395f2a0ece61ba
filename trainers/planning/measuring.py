"""Measurements for predictions, in processes of their own as workers are, and kept on disk by what they depend on.

Workers of one machine compute at the same time and disturb each other, so as many processes measure at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError, OrchestrayError, StorageError, TrainingError
from orchestray.platform.run.files import write_atomic
from orchestray.trainers.planning.found import CountedRun, DryRun, LayerProfile, ServedRun

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier

    from orchestray.trainers.config.settings import ReplicaSettings

_FORMAT = 5
"""Version of the results on disk; those of another one are measured again."""
_PRELOADED = "orchestray.trainers.planning.preloaded"
_MOST_AT_ONCE = 8
_TIMEOUT_S = 300.0
_DISTURBED = 0.25
"""Part of the machine's time that other programs may take during a measurement."""
_TRIES = 3
"""Times that a measurement is made while others disturb it."""
_WITHOUT_INFLUENCE = (
    "epochs", "steps", "until", "early_stop", "best", "time_limit_s", "pause_at", "validate_every_steps", "faults",
    "checkpoint_storage", "checkpoint_every_steps", "checkpoint_keep", "model_directory", "lr_schedule", "seed",
    "batch_schedule",
)  # fmt: skip
"""Settings that no measurement depends on."""


@dataclass(frozen=True)
class Wanted:
    """A measurement.

    Args:
        kind: `dry_run` of each worker, `served` for a worker and its parameter servers, `profile` of a pipeline's
        layers, or `count` of what its workers hold and send.
        settings: settings of the run.
        num_threads: threads of each worker.
        at_once: workers of one machine, which compute at the same time.
    """

    kind: str
    settings: ReplicaSettings
    num_threads: int
    at_once: int

    @property
    def num_processes(self) -> int:
        """Number of processes that measure together."""
        if self.kind == "count":
            return 1
        if self.kind == "served":
            return 1 + int(self.settings.exchange["shards"])
        size = self.settings.layout.size if self.kind == "dry_run" else self.at_once
        return max(1, min(size, self.at_once, _MOST_AT_ONCE))

    def key(self, versions: Mapping[str, str]) -> str:
        """Return a name for what the result depends on."""
        settings = _fields_of(self.settings)
        for name in _WITHOUT_INFLUENCE:
            settings.pop(name)
        if self.kind == "profile":  # of the layers, whatever is made of them
            split = settings["pipeline"].split
            settings["pipeline"] = split if isinstance(split, list) else None
            for name in ("optimizer", "exchange", "compression", "aggregation", "grad_clip", "average"):
                settings.pop(name)
        known = [_FORMAT, self.kind, settings, self.num_threads, self.at_once, dict(versions)]
        return hashlib.sha256(json.dumps(known, sort_keys=True, default=_plain).encode()).hexdigest()[:32]


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _plain(value: object) -> Any:
    return _fields_of(value) if is_dataclass(value) else str(value)


class Measurements:
    """Results of measurements, each made once.

    Args:
        directory: directory that keeps them; None: they are forgotten with this object.
        versions: versions that results depend on.
        cores: cores of this machine.
    """

    def __init__(self, directory: Path | None, versions: Mapping[str, str], cores: int) -> None:
        self._directory, self._versions, self._cores = directory, versions, cores
        self._known: dict[str, list[dict[str, Any]]] = {}
        self._context: Any = None
        self.num_made = 0
        """Number of measurements that this object has made."""
        self.num_disturbed = 0
        """Number of those during which other programs took much of the machine; they are not kept on disk."""

    def dry_runs(self, wanted: Wanted) -> list[DryRun]:
        """Return the dry runs of workers that compute at the same time on one machine."""
        return [DryRun.from_json(each) for each in self._of(wanted)]

    def served(self, wanted: Wanted) -> ServedRun:
        """Return the run of one worker with its parameter servers."""
        worker, *servers = self._of(wanted)
        return ServedRun.of(worker, servers)

    def profiles(self, wanted: Wanted) -> list[LayerProfile]:
        """Return the measured layers, by each of the processes that measured at once."""
        return [LayerProfile.from_json(each) for each in self._of(wanted)]

    def counted(self, wanted: Wanted) -> CountedRun:
        """Return what the workers of a pipeline hold and send."""
        return CountedRun.from_json(self._of(wanted)[0])

    def knows(self, wanted: Wanted) -> bool:
        """Return True if the measurement needs not be made."""
        key = wanted.key(self._versions)
        return key in self._known or self._read(key) is not None

    def _of(self, wanted: Wanted) -> list[dict[str, Any]]:
        key = wanted.key(self._versions)
        if key not in self._known:
            found = self._read(key)
            if found is None:
                found, is_disturbed = self._made(wanted)
                if not is_disturbed:
                    self._keep(key, found)
            self._known[key] = found
        for failure in (each for each in self._known[key] if "error" in each):
            raise _ERRORS.get(failure["kind"], TrainingError)(failure["error"])
        return self._known[key]

    def _read(self, key: str) -> list[dict[str, Any]] | None:
        if self._directory is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            return list(json.loads((self._directory / f"{key}.json").read_text(encoding="utf-8")))
        return None

    def _keep(self, key: str, found: Sequence[Mapping[str, Any]]) -> None:
        if self._directory is not None:
            with contextlib.suppress(OSError, StorageError):  # a full disk: it is measured again
                self._directory.mkdir(parents=True, exist_ok=True)
                write_atomic(self._directory / f"{key}.json", json.dumps(found).encode())

    def _made(self, wanted: Wanted) -> tuple[list[dict[str, Any]], bool]:
        """Measure, and again if that was disturbed; return the least disturbed results, and True if they are that, too.

        Other programs disturb what is measured while they take much of the machine.
        """
        self.num_made += 1
        tried: list[tuple[float, list[dict[str, Any]]]] = []
        while len(tried) < _TRIES and (not tried or tried[-1][0] > _DISTURBED * self._cores):
            began_s, busy_s = time.monotonic(), _busy_s()
            found = self._from_processes(wanted)
            own_s = sum(each.pop("process_s", 0.0) for each in found)
            tried.append(((_busy_s() - busy_s - own_s) / (time.monotonic() - began_s), found))
        others, found = min(tried, key=itemgetter(0))
        is_disturbed = others > _DISTURBED * self._cores
        self.num_disturbed += is_disturbed
        return found, is_disturbed

    def _from_processes(self, wanted: Wanted) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="orchestray-plan-") as folder:
            return self._meeting(wanted, Path(folder) / "meeting")

    def _meeting(self, wanted: Wanted, meeting: Path) -> list[dict[str, Any]]:
        context, number = self._forks(), wanted.num_processes
        barrier = context.Barrier(number)
        pipes, processes = [], []
        for rank in range(number):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_measure, args=(wanted, rank, meeting, barrier, there), daemon=True)
            with _without_main():
                process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            found = []
            for pipe in pipes:
                found.append(_result(pipe, wanted))
                if "error" in found[-1]:
                    barrier.abort()  # the others do not wait for it
            return found
        finally:
            for process in processes:
                process.join(1.0)
                if process.is_alive():
                    process.kill()

    def _forks(self) -> Any:
        """Return the context of processes that are forked from one in which all is imported."""
        if self._context is None:
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload([_PRELOADED])
        return self._context


def _busy_s() -> float:
    """Return the seconds for which the cores of this machine have computed since it was started."""
    import psutil

    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


_ERRORS = {"ConfigError": ConfigError}


def _measure(wanted: Wanted, rank: int, meeting: Path, barrier: Barrier, results: Connection) -> None:
    """Measure in this process, and send the result."""
    import torch

    from orchestray.platform.actors.member import keep_freed_memory

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback: the plan says what happened
    torch.set_num_threads(wanted.num_threads)
    keep_freed_memory()  # as workers do
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # what the task prints is not the plan
    warnings.simplefilter("ignore")  # a run shows them

    def start() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(_TIMEOUT_S)

    try:
        results.send({**_found(wanted, rank, meeting, start), "process_s": time.process_time()})
    except Exception as error:  # noqa: BLE001 - of any kind: it may be the task's
        barrier.abort()
        text = str(error) if isinstance(error, OrchestrayError) else f"{type(error).__name__}: {error}"
        results.send({"error": text, "kind": type(error).__name__})


def _found(wanted: Wanted, rank: int, meeting: Path, start: Callable[[], None]) -> dict[str, Any]:
    from orchestray.trainers.planning import counting, dry_run, served

    settings = wanted.settings
    if wanted.kind == "count":
        return counting.count(settings).to_json()
    if wanted.kind == "served":
        alone = served.of_one_worker(settings, meeting.parent)
        if rank == 0:
            return served.work(alone, meeting, start)
        return served.serve(alone, rank - 1, meeting, start)
    made = dry_run.dry_run(settings, start) if wanted.kind == "dry_run" else dry_run.profile(settings, start)
    return made.to_json()


def _result(pipe: Connection, wanted: Wanted) -> dict[str, Any]:
    try:
        if pipe.poll(_TIMEOUT_S):
            return dict(pipe.recv())
        why = f"it took more than {_TIMEOUT_S:g} s"
    except EOFError:
        why = "its process ended, perhaps for want of memory"
    return {"error": f"a worker of {wanted.settings.layout.size} could not be measured: {why}", "kind": "TrainingError"}


@contextlib.contextmanager
def _without_main() -> Any:
    """Start processes that do not import the program that starts them: it may have no guard."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), main.__spec__
    if file is not None:
        del main.__file__
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file
