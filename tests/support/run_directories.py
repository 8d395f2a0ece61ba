"""Directories of runs and searches as real ones leave them, made in a moment: the formats are the writers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml

from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.metrics import JsonLinesLog
from orchestray.search.results.paths import SearchPaths
from orchestray.search.results.schema import TrialLine
from orchestray.search.spaces.registry import make_space

RUN_CONFIG: dict[str, Any] = {
    "name": "run",
    "task": {"type": "digits", "hidden": [128, 128]},
    "train": {"batch_size": 64, "epochs": 20, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}, "seed": 0},
    "strategy": {
        "network": {"data": 2, "tensor": 1, "pipeline": 1},
        "exchange": {"type": "parameter_server", "consistency": "stale", "staleness": 2},
        "compression": {"type": "none"},
    },
}


class WrittenRun:
    """A run that is written line by line; it is live until `finish` or `close`."""

    def __init__(self, runs_dir: Path, name: str, *, num_steps: int = 460, seed: int = 0) -> None:
        self.directory = RunDirectory.create(runs_dir, name)
        self.path = self.directory.path
        self.num_steps = num_steps
        self.step = 0
        self._rng = np.random.default_rng(seed)
        self._metrics = JsonLinesLog(self.directory.paths.metrics)
        self._events = JsonLinesLog(self.directory.paths.events)
        self._last: dict[str, Any] = {}
        self.directory.write_config(yaml.safe_dump({**RUN_CONFIG, "name": name}, sort_keys=False))
        self.event("started", total_steps=num_steps, steps_per_epoch=23, workers=2, parameter_servers=1)
        self.actors = [
            {"role": role, "rank": rank, "pid": 4000 + place, "node": "192.0.2.2"}
            for place, (role, rank) in enumerate([("worker", 0), ("worker", 1), ("parameter_server", 0)])
        ]
        for actor in self.actors:
            self.event("worker_started", **actor)
        self.directory.write_actors(self.actors)

    def event(self, name: str, *, role: str | None = None, rank: int | None = None, **more: Any) -> None:
        time_s = round(2.0 + 0.02 * self.step, 3)
        self._events.append_lines([{"event": name, "time_s": time_s, "role": role, "rank": rank, **more}])
        self._events.flush()

    def steps(self, count: int) -> None:
        """Do `count` more steps."""
        lines = []
        for _ in range(count):
            self.step += 1
            noise = float(self._rng.lognormal(0, 0.16))
            loss = (0.06 + 2.25 * np.exp(-self.step / 70)) * noise
            line = {"step": self.step, "epoch": 1 + (self.step - 1) // 23, "time_s": round(2.0 + 0.02 * self.step, 3)}
            staleness = int(self._rng.choice(3, p=[0.6, 0.28, 0.12]))
            speed = 3200.0 * float(self._rng.lognormal(0, 0.08))
            lines.append({**line, "loss": loss, "lr": 0.1, "samples_per_s": speed, "staleness": staleness})
            if self.step % 23 == 0:
                loss = 0.11 + 2.2 * float(np.exp(-self.step / 80))
                accuracy = 0.975 - 0.85 * float(np.exp(-self.step / 60))
                self._last = {**line, "split": "validation", "loss": loss, "accuracy": accuracy}
                lines.append(self._last)
            if self.step % 100 == 0:
                self.event("checkpoint_saved", step=self.step)
        self._metrics.append_lines(lines)
        self._metrics.flush()

    def finish(self, status: str = "succeeded", error: str | None = None) -> None:
        self.directory.write_actors([])
        self.event("finished" if status == "succeeded" else status, error=error)
        validation = {key: self._last.get(key) for key in ("loss", "accuracy")} if self._last else None
        self.directory.write_result(
            {
                "status": status,
                "steps": self.step,
                "epochs": round(self.step / 23, 2),
                "seconds": 2.0 + 0.02 * self.step,
                "samples_per_s": 3187.2,
                "final": {"train": {"loss": 0.071}, "validation": validation},
                "bytes": {"sent": 427664 * self.step, "dense": 427664 * self.step},
                "staleness": {"max": 2, "mean": 0.52, "histogram": {"0": 552, "1": 258, "2": 110}},
                "memory": {"peak_bytes": [406769664, 406667264, 401354752]},
                "restarts": 0,
                "error": error,
                "predicted": {"step_s": 0.019, "interval_s": [0.017, 0.0205], "measured_step_s": 0.02},
                "workers": [
                    {"shares": 452, "busy_s": 1.25, "waited_s": 7.21},
                    {"shares": 468, "busy_s": 1.31, "waited_s": 6.79},
                ],
            }
        )
        self.close()

    def close(self) -> None:
        """Close the files as the death of the process would: nothing more is written, and the lock is free."""
        for log in (self._metrics, self._events):
            log.close()
        self.directory.close()


class WrittenSearch:
    """A search that is written line by line; it is live until `finish` or `close`."""

    def __init__(self, runs_dir: Path, name: str, search: dict[str, Any]) -> None:
        self.directory = RunDirectory.create(runs_dir, name)
        self.path = self.directory.path
        self.paths = SearchPaths(self.path)
        self.lines: list[dict[str, Any]] = []
        self._logs = {
            "trials": JsonLinesLog(self.paths.trials),
            "reports": JsonLinesLog(self.paths.reports),
            "lineage": JsonLinesLog(self.paths.lineage_log),
        }
        config = {"name": name, "base": RUN_CONFIG, "search": search}
        self.directory.write_config(yaml.safe_dump(config, sort_keys=False))

    def append(self, log: str, **line: Any) -> None:
        self._logs[log].append_lines([line])
        self._logs[log].flush()

    def ended(self, line: TrialLine) -> None:
        self.lines.append(line.to_json())
        self.append("trials", **line.to_json())

    def finish(self) -> None:
        best = max((line for line in self.lines if line["objective"] is not None), key=lambda line: line["objective"])
        counts = {
            name: sum(line["status"] == name for line in self.lines) for name in ("succeeded", "stopped", "failed")
        }
        kept = {key: best[key] for key in ("trial", "objective", "config", "genome") if key in best}
        self.directory.write_result(
            {"status": "succeeded", "trials": len(self.lines), "best": kept, "seconds": 184.2, "counts": counts}
        )
        with WrittenBest(self.path / "best", self.path.name) as written:
            written.text = yaml.safe_dump({**RUN_CONFIG, "name": self.path.name}, sort_keys=False)
        self.close()

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
        self.directory.close()


class WrittenBest:
    """The run that a search leaves as its best."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name, self.text = path, name, ""

    def __enter__(self) -> Self:
        self.path.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        (self.path / "config.yaml").write_text(self.text)
        (self.path / "result.json").write_text(json.dumps({"status": "succeeded", "steps": 400}))


LR = "train.optimizer.lr"
MOMENTUM = "train.optimizer.momentum"
BATCH = "train.batch_size"


def random_search(runs_dir: Path, name: str = "digits-random", *, trials: int = 48, seed: int = 0) -> WrittenSearch:
    """Write a random search of three keys: the learning rate decides most of the result."""
    search = WrittenSearch(
        runs_dir,
        name,
        {
            "method": {"type": "random"},
            "objective": [{"metric": "accuracy", "mode": "max"}],
            "space": {
                LR: {"type": "log_uniform", "low": 1e-4, "high": 1.0},
                MOMENTUM: {"type": "uniform", "low": 0.0, "high": 0.99},
                BATCH: {"type": "choice", "values": [32, 64, 128]},
            },
            "budget": {"trials": trials + 4, "steps_per_trial": 200},
        },
    )
    rng = np.random.default_rng(seed)
    for trial in range(trials):
        config = {LR: 10 ** rng.uniform(-4, 0), MOMENTUM: rng.uniform(0, 0.99), BATCH: int(rng.choice([32, 64, 128]))}
        quality = np.exp(-((np.log10(config[LR]) + 0.9) ** 2) / 2.2) * (0.9 + 0.1 * config[MOMENTUM])
        search.append("lineage", trial=trial, parent=None, step=0, change="", config=config)
        last = 20 if quality < 0.2 else 200
        accuracy = 0.1
        for step in range(20, last + 1, 20):
            accuracy = float(0.1 + 0.87 * quality * (1 - np.exp(-step / 50)) + rng.normal(0, 0.006))
            metrics = {"accuracy": accuracy, "loss": 2.3 * (1 - accuracy)}
            search.append("reports", trial=trial, step=step, time_s=trial + step / 100, metrics=metrics)
        failed = trial % 17 == 11
        search.ended(
            TrialLine(
                trial,
                "failed" if failed else "stopped" if last == 20 else "succeeded",
                None if failed else accuracy,
                config,
                steps=last,
                seconds=last / 160,
                error="TrainingError: the loss is nan at step 180" if failed else None,
            )
        )
    return search


def population_search(runs_dir: Path, name: str = "digits-pbt", *, population: int = 8, seed: int = 1) -> WrittenSearch:
    """Write a population-based training: the worst two go on from the best two, with other values."""
    search = WrittenSearch(
        runs_dir,
        name,
        {
            "method": {"type": "population_based_training", "population": population, "interval_steps": 50},
            "objective": [{"metric": "accuracy", "mode": "max"}],
            "space": {
                LR: {"type": "log_uniform", "low": 1e-4, "high": 1.0},
                MOMENTUM: {"type": "uniform", "low": 0.0, "high": 0.99},
            },
            "budget": {"trials": population, "steps_per_trial": 600},
        },
    )
    rng = np.random.default_rng(seed)
    members = [{LR: float(10 ** rng.uniform(-4, 0)), MOMENTUM: float(rng.uniform(0, 0.99))} for _ in range(population)]
    skill = np.full(population, 0.1)
    for trial, config in enumerate(members):
        search.append("lineage", trial=trial, parent=None, step=0, change="drawn", config=config)
    for step in range(50, 601, 50):
        gains = np.array([np.exp(-((np.log10(config[LR]) + 0.8) ** 2) / 1.5) for config in members])
        skill = skill + (0.97 - skill) * 0.3 * gains + rng.normal(0, 0.004, population)
        for trial, config in enumerate(members):
            metrics = {"accuracy": float(skill[trial]), "loss": float(2.3 * (1 - skill[trial]))}
            search.append("reports", trial=trial, step=step, time_s=step / 20, metrics=metrics, config=config)
        if step == 600:
            break
        order = np.argsort(skill)
        for loser, winner in zip(order[:2], order[::-1][:2], strict=True):
            factors = rng.choice([0.8, 1.2], 2)
            values = zip(members[winner].items(), factors, strict=True)
            members[loser] = {key: min(1.0, value * factor) for (key, value), factor in values}
            skill[loser] = skill[winner]
            change = f"copied trial {winner}; lr x {factors[0]}, momentum x {factors[1]}"
            node = {"trial": int(loser), "parent": int(winner), "step": step, "change": change}
            search.append("lineage", **node, config=members[loser])
    for trial, config in enumerate(members):
        search.ended(TrialLine(trial, "succeeded", float(skill[trial]), config, steps=600, seconds=9.1, change="drawn"))
    return search


def evolution_search(
    runs_dir: Path, name: str = "digits-evolution", *, trials: int = 60, seed: int = 2
) -> WrittenSearch:
    """Write a regularised evolution of chains of layers, for accuracy and few parameters."""
    goals = [{"metric": "accuracy", "mode": "max"}, {"metric": "parameters", "mode": "min"}]
    search = WrittenSearch(
        runs_dir,
        name,
        {
            "method": {"type": "regularized_evolution", "population": 12, "tournament": 4},
            "objective": goals,
            "space": {},
            "architecture": {"space": "chain", "channels": [8, 16, 32], "widths": [32, 64]},
            "budget": {"trials": trials, "steps_per_trial": 100},
        },
    )
    rng, space = np.random.default_rng(seed), make_space("chain", channels=[8, 16, 32], widths=[32, 64])
    alive: list[tuple[int, Any, float]] = []
    for trial in range(trials):
        parent, change = None, ""
        if len(alive) < 12:
            genome = space.sample(rng)
        else:
            chosen = [alive[place] for place in rng.choice(len(alive), 4, replace=False)]
            parent, source, _ = max(chosen, key=lambda each: each[2])
            genome, change = space.mutate(source, rng), "mutated"
        num_layers = len(json.dumps(genome)) / 60
        accuracy = float(np.clip(0.97 - 0.5 * np.exp(-num_layers / 1.6) + rng.normal(0, 0.01), 0, 1))
        parameters = int(900 * num_layers**2 + rng.integers(200))
        node = {"trial": trial, "parent": parent, "step": 0, "change": change}
        search.append("lineage", **node, config={})
        for step in (50, 100):
            metrics = {"accuracy": accuracy * step / 100, "parameters": float(parameters)}
            search.append("reports", trial=trial, step=step, time_s=trial * 2.0, metrics=metrics)
        search.ended(
            TrialLine(
                trial,
                "succeeded",
                accuracy,
                genome=genome,
                parent=parent,
                steps=100,
                seconds=1.4,
                objectives={"accuracy": accuracy, "parameters": float(parameters)},
                parameters=parameters,
                flops=parameters * 40,
                latency_ms=0.2 + parameters / 1e5,
                change=change,
            )
        )
        alive = [*alive, (trial, genome, accuracy)][-12:]
    return search


def damaged_run(runs_dir: Path, name: str = "damaged") -> Path:
    """Write a run whose disk went bad: a torn result, lines that are not JSON objects, a config that is not YAML."""
    path = runs_dir / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("name: [unclosed\n")
    (path / "result.json").write_text('{"status": "succee')
    (path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 2.3}\n\x00\xff\xfe nothing\n[1, 2]\n{"step": "x", "loss": {}}\n{"step": 2, "loss": 2.1}\n'
        b'{"step": 3, "lo'
    )
    (path / "events.jsonl").write_text('{"event": 7}\n"just text"\n')
    (path / "actors.json").write_text('{"role": "worker"}')
    return path


def write_all(runs_dir: Path) -> list[WrittenRun | WrittenSearch]:
    """Write one run of each kind; return those that are still live."""
    finished = WrittenRun(runs_dir, "digits-stale-synchronous")
    finished.steps(460)
    finished.finish()
    failed = WrittenRun(runs_dir, "digits-diverged", seed=3)
    failed.steps(130)
    failed.finish("failed", "TrainingError: the loss is nan at step 131; lower train.optimizer.lr")
    died = WrittenRun(runs_dir, "digits-killed", seed=5)
    died.steps(200)
    died.close()
    population_search(runs_dir).finish()
    evolution_search(runs_dir).finish()
    damaged_run(runs_dir)
    live = WrittenRun(runs_dir, "digits-live", seed=4)
    live.steps(260)
    return [live, random_search(runs_dir)]


if __name__ == "__main__":  # a directory to look at, with a run that goes on until Ctrl-C
    import sys
    import time

    written = write_all(Path(sys.argv[1]))
    print("ready", flush=True)
    while True:
        time.sleep(0.5)
        for each in written:
            if isinstance(each, WrittenRun):
                each.steps(3)
