"""Handing a trial's state on to another: by files of ours, Ray's object store, and Tune's checkpoints.

All are timed from the call that saves the state in one process until it is in tensors of another process. Files and
the object store are driven by this process, as a search drives its trials. Tune's checkpoints are those of its own
population-based training in a `tune.Tuner`: of two trials, one takes over the other's state at each result.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from harness.benchmark import BenchmarkError, Options, Report, alternate, run, say
from orchestray.platform.cluster.cluster import connect
from orchestray.search.checkpoints.state_files import StateAt, StateFiles, read_state, write_state
from orchestray.search.trials.program import TrialState

_SIZES_MB = (0.1, 8.0, 100.0)
_NUM_TENSORS = 8
_FILE = "state.safetensors"
FILES, STORE, TUNE = "files of ours", "object store", "checkpoints of Tune"


def state_of(size_mb: float) -> TrialState:
    """Return a state of `_NUM_TENSORS` tensors that have `size_mb` in all."""
    length = int(size_mb * 1e6 / 4 / _NUM_TENSORS)
    return TrialState({f"layer{number}": torch.rand(length) for number in range(_NUM_TENSORS)}, {"step": 1})


class Process:
    """The process of a trial."""

    def __init__(self, size_mb: float) -> None:
        self._state = state_of(size_mb)

    def write(self, directory: str, number: int) -> None:
        StateFiles(directory).write(StateAt(0, number), self._state)

    def read(self, directory: str, number: int) -> float:
        """Take the state of a file over; return the time by the system's clock."""
        self._state = StateFiles(directory).read(StateAt(0, number))
        return time.time()

    def put(self) -> Any:
        """Put the state into the object store; the list keeps Ray from sending the value instead of the reference."""
        return [ray.put({name: tensor.numpy() for name, tensor in self._state.tensors.items()})]

    def get(self, references: list[Any]) -> float:
        """Take the state of the object store over; return the time by the system's clock."""
        found: dict[str, np.ndarray] = ray.get(references[0])
        # Arrays of the object store cannot be written to.
        self._state = TrialState({name: torch.from_numpy(value.copy()) for name, value in found.items()}, {})
        return time.time()


def by_files(source: Any, target: Any, directory: Path, number: int) -> float:
    """Hand the state on by a file; return milliseconds."""
    began_s = time.time()
    ray.get(source.write.remote(str(directory), number))
    ended_s: float = ray.get(target.read.remote(str(directory), number))
    StateFiles(directory).remove(StateAt(0, number))
    return (ended_s - began_s) * 1e3


def by_store(source: Any, target: Any) -> float:
    """Hand the state on by the object store; return milliseconds."""
    began_s = time.time()
    references = ray.get(source.put.remote())
    ended_s: float = ray.get(target.get.remote(references))
    return (ended_s - began_s) * 1e3


class TuneTrial(tune.Trainable):
    """A trial that does nothing but save and load a state; it writes down when it does."""

    def setup(self, config: dict[str, Any]) -> None:
        self._state, self._log, self._rank = state_of(config["size_mb"]), Path(config["log"]), config["rank"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._rank = new_config["rank"]
        return True

    def step(self) -> dict[str, Any]:
        return {"score": self._rank}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self._note("saves")
        write_state(Path(checkpoint_dir) / _FILE, self._state)

    def load_checkpoint(self, checkpoint: Any) -> None:
        self._state = read_state(Path(checkpoint) / _FILE)
        self._note("has loaded")

    def _note(self, what: str) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps([what, time.time()]) + "\n")


def by_tune(size_mb: float, place: Path, times: int) -> list[float]:
    """Hand states on by Tune's checkpoints; return the milliseconds of each."""
    place.mkdir()
    log = place / "log.jsonl"
    random.seed(0)  # Tune's schedulers draw from it
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="score",
        mode="max",
        perturbation_interval=1,
        hyperparam_mutations={"unused": tune.uniform(0.0, 1.0)},
        quantile_fraction=0.5,
        synch=True,
    )
    space = {"size_mb": size_mb, "log": str(log), "rank": tune.grid_search([0, 1]), "unused": 0.5}
    tune.Tuner(
        TuneTrial,
        param_space=space,
        tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(place), name="tune", stop={"training_iteration": times}, verbose=0),
    ).fit()
    taken_ms, saved_s = [], None
    for what, at_s in (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()):
        if what == "saves":
            saved_s = at_s
        elif saved_s is not None:
            taken_ms.append((at_s - saved_s) * 1e3)
            saved_s = None
    if not taken_ms:
        raise BenchmarkError("Tune has handed on no state")
    return taken_ms


def by_processes(size_mb: float, directory: Path, rounds: int) -> dict[str, list[float]]:
    """Hand states on between two processes by files and by the object store, in turns; return the milliseconds."""
    source, target = (ray.remote(num_cpus=1)(Process).remote(size_mb) for _ in range(2))
    by_files(source, target, directory, 0)  # the first call imports
    by_store(source, target)
    found: dict[str, list[float]] = {FILES: [], STORE: []}
    sides = {
        FILES: lambda: found[FILES].append(by_files(source, target, directory, len(found[FILES]))),
        STORE: lambda: found[STORE].append(by_store(source, target)),
    }
    alternate(sides, rounds, lambda _text: None)  # a line for each of the many turns would hide the medians
    for actor in (source, target):
        ray.kill(actor)
    return found


def measure(report: Report, options: Options) -> None:
    rounds = options.rounds(15)
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    cluster = connect()
    sizes = _SIZES_MB[:1] if options.quick else _SIZES_MB
    report.settings = {"rounds": rounds, "tensors": _NUM_TENSORS, "sizes_mb": list(sizes)}
    rows = []
    for size_mb in sizes:
        found = by_processes(size_mb, options.workspace / f"states-{size_mb}", rounds)
        found[TUNE] = by_tune(size_mb, options.workspace / f"tune-{size_mb}", rounds + 1)
        for name, taken_ms in found.items():
            measured = report.add(f"{size_mb:g} MB, {name}", "ms", taken_ms)
            say(f"{size_mb:g} MB, {name}: {measured.median:.1f} ms, {len(taken_ms)} times")
            rows.append([f"{size_mb:g} MB", name, f"{measured.median:.1f} ms", str(len(taken_ms))])
    report.table(["state", "handed on by", "median", "times"], rows)
    report.notes.append(
        "From the call that saves until the tensors are in the other process. A search of ours hands states on by "
        "files. The time of Tune's checkpoints has the pause and the start of the trials in it, which come with them."
    )
    cluster.close()


if __name__ == "__main__":
    run("copy_weights", "A trial's state handed on: our files, the object store, Tune's checkpoints.", measure)
