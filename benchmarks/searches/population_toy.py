"""The toy of population-based training, population 4 on two CPUs, against Ray Tune's own PBT.

All sides do the same: 4 members, 200 steps each, a report and a look at the others every 20 steps. Tune's PBT runs with
its function API as it comes, and with its class API and processes that are used again. Ray runs before the clock does:
the one that orchestray starts, for all sides. What it costs on a Ray of a plain `ray.init` is shown beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

import orchestray
from harness import benchmark
from orchestray.platform.cluster.cluster import connect

_RATE, _CPUS, _POPULATION = 0.01, 2, 4
_LEAST_Q = 1.15
_PLAIN = ", on a plain Ray"


def climbed(theta: list[float], h: tuple[float, float], steps: int) -> list[float]:
    for _ in range(steps):
        theta = [value - 2.0 * _RATE * weight * value for value, weight in zip(theta, h, strict=True)]
    return theta


def q_of(theta: list[float]) -> float:
    return 1.2 - sum(value**2 for value in theta)


class ToyTrainable(tune.Trainable):
    """The toy in the class API."""

    def setup(self, config: dict[str, Any]) -> None:
        self.theta = [0.9, 0.9]
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.own, self.every = (new_config["h_a"], new_config["h_b"]), new_config["every"]
        return True

    def step(self) -> dict[str, Any]:
        self.theta = climbed(self.theta, self.own, self.every)
        return {"q": q_of(self.theta)}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "theta.json").write_text(json.dumps(self.theta), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.theta = json.loads((Path(checkpoint) / "theta.json").read_text(encoding="utf-8"))


def toy_function(config: dict[str, Any]) -> None:
    """Run the toy in the function API."""
    theta, step = [0.9, 0.9], 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as place:
            theta, step = json.loads((Path(place) / "state.json").read_text(encoding="utf-8"))
    while step < config["iterations"]:
        theta, step = climbed(theta, (config["h_a"], config["h_b"]), config["every"]), step + 1
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "state.json").write_text(json.dumps([theta, step]), encoding="utf-8")
            tune.report({"q": q_of(theta)}, checkpoint=tune.Checkpoint.from_directory(place))


def by_tune(trainable: Any, place: Path, steps: int, every: int, *, reuse: bool) -> float:
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        hyperparam_mutations={"h_a": tune.uniform(0.0, 1.0), "h_b": tune.uniform(0.0, 1.0)},
        quantile_fraction=0.25,
        resample_probability=0.25,
    )
    space = {"h_a": tune.uniform(0.0, 1.0), "h_b": tune.uniform(0.0, 1.0), "every": every, "iterations": steps // every}
    tuner = tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            scheduler=scheduler, metric="q", mode="max", num_samples=_POPULATION, reuse_actors=reuse
        ),
        run_config=tune.RunConfig(storage_path=str(place), stop={"training_iteration": steps // every}, verbose=0),
    )
    return float(tuner.fit().get_best_result().metrics["q"])


def by_us(place: Path, steps: int, every: int) -> float:
    unit = {"type": "uniform", "low": 0.0, "high": 1.0}
    config = {
        "name": "toy",
        "base": {
            "name": "toy",
            "task": {"type": f"{benchmark.FOLDER / 'searches' / 'toy_task.py'}:Toy"},
            "train": {
                "batch_size": 1,
                "steps": steps,
                "optimizer": {"type": "sgd", "lr": _RATE},
                "validate_every_steps": every,
            },
        },
        "search": {
            "method": {
                "type": "population_based_training",
                "population": _POPULATION,
                "interval_steps": every,
                "fraction": 0.25,
                "explore": "both",
            },
            "objective": {"metric": "q", "mode": "max"},
            "space": {"task.h_a": unit, "task.h_b": unit},
            "budget": {"trials": _POPULATION, "steps_per_trial": steps},
            "parallel": _CPUS,
        },
    }
    return float(orchestray.search(config, runs_dir=place).result["best"]["objective"])


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds, steps, every = options.rounds(3), 60 if options.quick else 200, 20
    report.settings = {"rounds": rounds, "population": _POPULATION, "steps": steps, "every_steps": every, "cpus": _CPUS}
    seconds: dict[str, list[float]] = {}
    best: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[Path], float]) -> None:
        place = options.workspace / f"{name.replace(' ', '-')}-{len(seconds.get(name, []))}"
        place.mkdir()
        began_s = time.perf_counter()
        best.setdefault(name, []).append(run(place))
        seconds.setdefault(name, []).append(time.perf_counter() - began_s)

    sides: dict[str, Callable[[Path], float]] = {
        "orchestray": partial(by_us, steps=steps, every=every),
        "tune function": partial(_function_side, steps=steps, every=every),
        "tune class reuse": partial(_class_side, steps=steps, every=every),
    }
    plainly = {name + _PLAIN: sides[name] for name in ("orchestray", "tune class reuse")}
    with _on_cores(_CPUS):
        for started, those in ((_ray_of_ours(), sides), (_plain_ray(), plainly)):
            with started:
                benchmark.alternate(
                    {name: partial(timed, name, run) for name, run in those.items()}, rounds, benchmark.say
                )
    for name, values in seconds.items():
        report.add(name, "s", values)
        report.notes.append(f"best Q of {name}: {min(best[name]):.3f} at least")
    ours = seconds["orchestray"]
    by_function = report.compare("orchestray / tune function", ours, seconds["tune function"])
    report.goal("time, of Tune's function API", by_function, 0.15, "x")
    by_class = report.compare("orchestray / tune class reuse", ours, seconds["tune class reuse"])
    report.goal("time, of Tune's class API with reuse", by_class, 1.0, "x")
    report.compare(
        f"orchestray / tune class reuse{_PLAIN}", seconds["orchestray" + _PLAIN], seconds["tune class reuse" + _PLAIN]
    )
    if not options.quick:
        report.goal(f"how far the best Q is below {_LEAST_Q}", _LEAST_Q - min(best["orchestray"]), 0.0)


@contextlib.contextmanager
def _on_cores(number: int) -> Iterator[None]:
    """Keep this process, and the Ray that it starts, on a number of cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _ray_of_ours() -> Iterator[None]:
    cluster = connect()
    try:
        yield
    finally:
        cluster.close()


@contextlib.contextmanager
def _plain_ray() -> Iterator[None]:
    ray.init(num_cpus=_CPUS, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def _function_side(place: Path, steps: int, every: int) -> float:
    return by_tune(toy_function, place, steps, every, reuse=False)


def _class_side(place: Path, steps: int, every: int) -> float:
    return by_tune(ToyTrainable, place, steps, every, reuse=True)


if __name__ == "__main__":
    benchmark.run("population_toy", "The toy of population-based training against Ray Tune's own PBT", measure)
