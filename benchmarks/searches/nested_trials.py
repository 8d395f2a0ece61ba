"""Random mixes of trials that are whole gangs, with failures, kills and stops: each ends as it may, and leaves nothing.

A mix is a search with a method, a strategy and behaviours of its trials drawn by chance. It may succeed, fail because
every trial did, or be interrupted where it was stopped; each trial ends as its behaviour has it, and has its line.
"""

from __future__ import annotations

import collections
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import benchmark

_MIXES = 200
_DEADLOCK_S = 900.0
_STEPS, _EVERY = 15, 5
"""Steps of a trial, and from one report to the next: more than one that is killed in its third step comes to with a
restart, so that it never reports."""
_METHODS: Mapping[str, Mapping[str, Any]] = {
    "grid": {"type": "grid"},
    "random": {"type": "random"},
    "asha": {"type": "asha", "eta": 2, "grace_steps": _EVERY},
    "median_stopping": {
        "type": "median_stopping",
        "grace_steps": _EVERY,
        "every_steps": _EVERY,
        "min_trials": 1,
    },
    "population_based_training": {"type": "population_based_training", "interval_steps": _EVERY},
    "population_based_training, synchronous": {
        "type": "population_based_training",
        "interval_steps": _EVERY,
        "synchronous": True,
    },
    "omnivore": {"type": "omnivore", "every_steps": _EVERY + 3, "probe_steps": _EVERY},
}
_TRIALS = {"random": 3, "asha": 4, "median_stopping": 4, "population_based_training": 3}
"""By the type of a method; the others have one for each behaviour."""
_STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "allreduce": {"exchange": {"type": "allreduce"}},
    "parameter_server": {"exchange": {"type": "parameter_server"}},
    "averaging": {"exchange": {"type": "averaging", "every": 4}},
    "gossip": {"exchange": {"type": "gossip"}},
    "elastic_averaging": {"exchange": {"type": "elastic_averaging", "every": 2}},
    "pipeline": {"network": {"pipeline": 2}},
}
_BEHAVIOURS = ("fine", "raise", "killed", "slow", "fine again")
_MISBEHAVE = ("raise", "killed")
_ENDS = ("succeeded", "stopped", "failed")
_STATUSES = ("succeeded", "failed", "gave up", "interrupted", "crashed", "stuck")


@dataclass
class Mix:
    """A search and its outcome."""

    number: int
    method: str
    strategy: str
    config: dict[str, Any]
    stops_after: int | None
    """Changes of trials after which it is stopped; None: it is not."""
    stop: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    status: str = "stuck"
    """One of `_STATUSES`."""
    wrong: list[str] = field(default_factory=list)
    """Things that the search did and may not do."""

    @property
    def text(self) -> str:
        return f"{self.method} of {self.strategy}"


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    tests = str(benchmark.REPOSITORY / "tests")
    sys.path.insert(0, tests)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))  # for `support`
    from orchestray.platform.cluster.cluster import connect

    connect()
    taken_s, num_leaked, mixes = [], 0, []
    for number in range(options.rounds(_MIXES, quick=4)):
        began_s = time.perf_counter()
        mix = _draw(number)
        mixes.append(mix)
        threading.Thread(target=_run, args=(mix, options.workspace), daemon=True).start()
        is_done = mix.done.wait(_DEADLOCK_S)
        num_leaked += _num_groups()
        taken_s.append(time.perf_counter() - began_s)
        benchmark.say(f"mix {number + 1}, {mix.text}: {mix.status} in {taken_s[-1]:.1f} s; {num_leaked} leaked")
        for text in mix.wrong:
            benchmark.say(f"  wrong: {text}")
        if not is_done:
            break
    report.settings = {"mixes": len(mixes)}
    report.add("a mix", "s", taken_s)
    report.goal("deadlocks", float(sum(mix.status == "stuck" for mix in mixes)), 0.0)
    report.goal("leaked placement groups", float(num_leaked), 0.0)
    report.goal("mixes that ended otherwise than they may", float(sum(bool(mix.wrong) for mix in mixes)), 0.0)
    _tell(report, mixes)


def _tell(report: benchmark.Report, mixes: list[Mix]) -> None:
    """Add tables of how many ended in which way, by method and by strategy."""
    for kind in ("method", "strategy"):
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for mix in mixes:
            counts[getattr(mix, kind)][mix.status] += 1
        rows = [[name, *(str(counts[name][status]) for status in _STATUSES)] for name in sorted(counts)]
        report.table([kind, *_STATUSES], rows)
    report.details["statuses"] = dict(collections.Counter(mix.status for mix in mixes))
    report.details["wrong"] = {f"mix {mix.number + 1}, {mix.text}": mix.wrong for mix in mixes if mix.wrong}


def _draw(number: int) -> Mix:
    rng = random.Random(number)
    method, strategy = rng.choice(list(_METHODS)), rng.choice(list(_STRATEGIES))
    kind = _METHODS[method]["type"]
    behaviours = rng.sample(_BEHAVIOURS, k=rng.choice([2, 3]))
    space: dict[str, Any] = {"task.behaviour": {"type": "choice", "values": behaviours}}
    parameters, budget = dict(_METHODS[method]), {}
    if kind in _TRIALS:
        space["train.optimizer.lr"] = {"type": "log_uniform", "low": 0.01, "high": 0.3}
        budget["trials"] = _TRIALS[kind]
    if kind == "population_based_training":
        parameters["population"] = _TRIALS[kind]
    config = {
        "name": f"mix-{number}",
        "base": {
            "name": "trial",
            "task": {"type": "support.odd_task:OddTask", "behaviour": "fine"},
            "train": {"batch_size": 8, "steps": _STEPS, "optimizer": {"type": "sgd", "lr": 0.1}},
            "strategy": {"network": {"data": rng.choice([2, 2, 3])}, **_STRATEGIES[strategy]},
            "max_restarts": rng.choice([0, 1]),
        },
        "search": {
            "method": parameters,
            "objective": {"metric": "accuracy"},
            "space": space,
            "budget": budget,
            "parallel": rng.choice([1, 2]),
            "seed": number,
        },
    }
    return Mix(number, method, strategy, config, rng.choice([None, None, 2, 5]))


def _run(mix: Mix, workspace: Path) -> None:
    from orchestray.platform.errors import OrchestrayError
    from orchestray.search.config.load import load_search_config
    from orchestray.search.engine.run import run_search
    from orchestray.search.results.writer import SearchRecords

    seen: list[Any] = []

    def on_change(change: Any) -> None:
        seen.append(change)
        if mix.stops_after is not None and len(seen) >= mix.stops_after:
            mix.stop.set()

    status = "crashed"
    try:
        with SearchRecords.create(workspace, str(mix.config["name"])) as records:
            outcome = run_search(load_search_config(mix.config), records, stop=mix.stop, on_change=on_change)
        status = outcome.status
        mix.wrong += _wrong_with(mix, workspace, outcome)
    except OrchestrayError as error:
        if str(error).startswith("Each of the first"):
            status = "gave up"
        else:
            mix.wrong.append(f"it ended with {type(error).__name__}: {error}")
    except BaseException:
        mix.wrong.append(traceback.format_exc())
        raise
    finally:
        mix.status = status
        mix.done.set()


def _wrong_with(mix: Mix, workspace: Path, outcome: Any) -> Iterator[str]:
    """Yield what a search that has come to its end did and may not do."""
    from orchestray.platform.run.metrics import read_lines
    from orchestray.search.results.paths import SearchPaths

    paths = SearchPaths(workspace / str(mix.config["name"]))
    lines = {line["trial"]: line for line in read_lines(paths.trials)}
    calls = read_lines(paths.journal)
    asked = {call["proposal"]["trial"] for call in calls if call["call"] == "ask" and call["proposal"] is not None}
    for trial, line in lines.items():
        yield from _wrong_with_trial(trial, line)
    if not lines.keys() <= asked:
        yield f"trials {sorted(lines.keys() - asked)} have a line, and nobody asked for them"
    if outcome.status == "interrupted":
        if not mix.stop.is_set():
            yield "it was interrupted, and nobody stopped it"
        return
    if outcome.status == "failed" and not str(outcome.error).startswith("Every trial failed"):
        yield f"it failed: {outcome.error}"
    if outcome.status == "failed" and any(line["status"] != "failed" for line in lines.values()):
        yield "it failed, and not every trial has"
    if outcome.status == "succeeded" and not (paths.best / "model").is_dir():
        yield f"there is no run of its best trial ({outcome.best})"
    if asked - lines.keys():
        yield f"trials {sorted(asked - lines.keys())} have no line"
    search = mix.config["search"]
    wanted = search["budget"].get("trials", len(search["space"]["task.behaviour"]["values"]))
    if len(asked) < wanted:
        yield f"{len(asked)} trials were begun, and {wanted} wanted"


def _wrong_with_trial(trial: int, line: Mapping[str, Any]) -> Iterator[str]:
    status, behaviour = line["status"], line["config"]["task.behaviour"]
    if status not in _ENDS:
        yield f"trial {trial} ended as {status!r}"
    if (status == "failed") != (behaviour in _MISBEHAVE):
        yield f"trial {trial} is {behaviour!r} and ended as {status!r} at step {line['steps']}: {line['error']}"


def _num_groups() -> int:
    from ray.util import placement_group_table

    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


if __name__ == "__main__":
    benchmark.run(
        "nested_trials",
        "Random mixes of nested trials, stops and kills: each ends as it may, none leaves a placement group.",
        measure,
    )
