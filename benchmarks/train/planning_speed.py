"""Seconds of the planner beside those of what it measures: to calibrate, and to plan once all is measured.

One scheme of each kind is measured. All others get copies of these results, so that a plan finds every result on the
disk without half an hour of measurements. The predicted times mean nothing here.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness import benchmark
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.driver.engines.driver import HOST
from orchestray.trainers.machine import calibrate, kept
from orchestray.trainers.planning.candidates import candidates
from orchestray.trainers.planning.cluster import Cluster
from orchestray.trainers.planning.measuring import Measurements
from orchestray.trainers.planning.planner import Planner
from orchestray.trainers.planning.predict import Predictor
from orchestray.trainers.planning.record import Entry, Record

if TYPE_CHECKING:
    from pathlib import Path

    from orchestray.trainers.config.schema import TrainConfig

_LAYERS = 64
_CONFIG: dict[str, Any] = {
    "name": "deep",
    "task": {"type": f"{benchmark.FOLDER / 'harness' / 'tasks.py'}:Mlp", "widths": [64] * _LAYERS},
    "train": {"batch_size": 256, "steps": 1000, "optimizer": {"type": "sgd", "lr": 0.01}},
}
_MEASURED = ("2 replicas", "pipeline 2, gpipe, 4 micro-batches", "2 workers, synchronous server")
_WORKERS = (2, 16, 64)
_RECORDED = 500


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    # The user's record keeps out of it.
    os.environ["XDG_CACHE_HOME"] = str(options.workspace / "cache")
    benchmark.say("calibrate")
    began_s = time.perf_counter()
    machine = calibrate.calibrate(HOST, options.workspace, quick=options.quick)
    report.goal("calibrate", time.perf_counter() - began_s, 30.0, "s")
    directory, config = options.workspace / "measurements", load_train_config(_CONFIG)
    report.settings = {"layers": 2 * _LAYERS - 1, "recorded_runs": _RECORDED}
    # With a million cores no measurement counts as disturbed: its value does not matter here.
    kept_always = Measurements(directory, kept.versions(), 10**6)
    results = _measured(config, Predictor(Cluster(machine), kept_always))
    rows = []
    for workers in _WORKERS:
        cluster = Cluster(replace(machine, memory_bytes=10**15), max(1, workers // kept.cores()))
        num_schemes = _fill(directory, config, workers, Predictor(cluster, Measurements(None, {}, 1)), results)
        times_s = []
        for number in range(options.rounds(5, 2)):
            benchmark.say(f"{num_schemes} schemes of {workers} workers: {number + 1}")
            times_s.append(_planned_s(directory, config, workers, cluster))
        name = f"plan of {num_schemes} schemes of up to {workers} workers"
        report.add(name, "s", times_s)
        middle_s = statistics.median(times_s)
        rows.append([str(workers), str(num_schemes), f"{middle_s:.2f}", f"{1e3 * middle_s / num_schemes:.2f}"])
        if workers == 16:
            report.goal(
                "1,000 schemes of up to 16 workers, at the rate of their plan", 1000 * middle_s / num_schemes, 1.0, "s"
            )
    report.table(["workers", "schemes", "s", "ms a scheme"], rows)


def _measured(config: TrainConfig, predictor: Predictor) -> dict[str, Any]:
    """Measure one scheme of each kind; return the measurements by kind."""
    chosen = [each for each in candidates(config, 2, kept.cores()) if each[0].name in _MEASURED]
    found = {}
    for candidate, applied in chosen:
        benchmark.say(candidate.name)
        predictor.predict(applied, candidate.name, candidate.changes)
        found |= {each.kind: each for each in predictor.wanted(applied)}
    return found


def _fill(directory: Path, config: TrainConfig, workers: int, predictor: Predictor, results: dict[str, Any]) -> int:
    """Copy the results to where a plan looks for those of all schemes; return the number of schemes."""
    versions, tried = kept.versions(), candidates(config, workers, kept.cores())
    for applied in (config, *(applied for _, applied in tried)):
        for wanted in predictor.wanted(applied):
            place = directory / f"{wanted.key(versions)}.json"
            if not place.exists():
                shutil.copy(directory / f"{results[wanted.kind].key(versions)}.json", place)
    return len(tried)


def _planned_s(directory: Path, config: TrainConfig, workers: int, cluster: Cluster) -> float:
    measurements = Measurements(directory, kept.versions(), kept.cores())
    record = Record(
        Entry("zero", f"run-{number}", 1.0, 1.1, "", "here", "zero optimizer", str(number % 5))
        for number in range(_RECORDED)
    )
    began_s = time.perf_counter()
    Planner(cluster, measurements, record).plans(config, workers)
    took_s = time.perf_counter() - began_s
    if measurements.num_made:
        raise benchmark.BenchmarkError(f"{measurements.num_made} schemes were measured, and all were to be known")
    return took_s


if __name__ == "__main__":
    benchmark.run("planning_speed", "Seconds to calibrate, and to plan once all is measured", measure)
