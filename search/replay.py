"""The hyper-parameters of the winner of a search as a schedule, and a run that follows it.

The members of a population copy each other, so the winner's weights have come along one path through several trials.
Its steps and the values that held there are a schedule which one run can follow (Jaderberg et al. 2017, section 4.3).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from orchestray.platform.config.checks import find_problems
from orchestray.platform.config.load import load_train_config
from orchestray.platform.config.problems import translate
from orchestray.platform.config.schema import TrainConfig
from orchestray.platform.config.search.trial import put_in
from orchestray.platform.config.view import View
from orchestray.platform.errors import ConfigError, RunNameError
from orchestray.platform.run.files import dump_json, write_atomic
from orchestray.platform.run.metrics import read_lines
from orchestray.search.methods.population import packing
from orchestray.search.records.paths import SearchPaths

if TYPE_CHECKING:
    from orchestray.platform.run.load import Run

Schedule = list[tuple[int, dict[str, Any]]]
"""Steps, rising from 0, and the dotted keys with the values that hold after them."""


@dataclass(frozen=True)
class _Stretch:
    """Values that hold from a step on, and what was before."""

    from_step: int
    changes: Mapping[str, Any]
    before: _Stretch | None = None

    def schedule(self) -> Schedule:
        stretches: Schedule = []
        at: _Stretch | None = self
        while at is not None:
            if not stretches or at.from_step < stretches[-1][0]:  # else it was over before a step was made by it
                stretches.append((at.from_step, dict(at.changes)))
            at = at.before
        return stretches[::-1]


def schedule_of(journal: Sequence[Mapping[str, Any]], trial: int | None = None) -> Schedule:
    """The schedule that leads to the best report of a search.

    Args:
        journal: the calls to its method, with their answers, as `journal.jsonl` has them.
        trial: the winner, or the winning member of a population that is one trial; default: whoever reported the best
            score first, of those that have not failed.

    Raises:
        ConfigError: there is no report, or the winner's weights are inherited from a network that is another.
    """
    paths: dict[int, _Stretch] = {}
    steps: dict[int, int] = {}
    heirs: set[int] = set()
    best: tuple[float, int, _Stretch] | None = None
    packed = _Packed()
    failed = {e["finished"]["trial"] for e in journal if e["call"] == "tell" and e["finished"]["status"] == "failed"}
    for entry in journal:
        if entry["call"] == "ask" and (proposal := entry["proposal"]) is not None:
            paths[proposal["trial"]] = _Stretch(0, proposal["changes"])
            steps[proposal["trial"]] = 0
            if proposal["inherits"]:
                heirs.add(proposal["trial"])
            packed.begin(proposal)
        decided: list[tuple[int, Mapping[str, Any]]] = []
        if entry["call"] == "report":
            report = entry["report"]
            reporting = int(report["trial"])
            steps[reporting] = report["step"]
            is_packed = reporting in packed.trials  # the winner is a member of it, and no trial of that number
            path = packed.best(report["told"]) if is_packed else paths[reporting]
            is_wanted = reporting not in failed if trial is None or is_packed else reporting == trial
            if is_wanted and (best is None or report["score"] > best[0]):
                best = report["score"], reporting, path
            decided.append((reporting, entry["decision"]))
        decided += [(released, decision) for released, decision in entry.get("released", ())]
        for member, decision in decided:
            if decision["decision"] == "become":
                source = decision["source"]
                steps[member] = steps[source]
                paths[member] = _Stretch(steps[source], decision["changes"], paths[source])
    if best is None:
        raise ConfigError("there is no schedule to follow: the search has no report yet")
    if best[1] in heirs:
        raise ConfigError(
            f"the best trial, {best[1]}, began with weights of another network; only searches whose trials copy each "
            "other whole (population_based_training) or begin afresh can be followed"
        )
    return best[2].schedule()


class _Packed:
    """The members of a population that is one trial, by what it tells."""

    def __init__(self) -> None:
        self.trials: set[int] = set()
        self._paths: list[_Stretch] = []

    def begin(self, proposal: Mapping[str, Any]) -> None:
        if proposal["program"] == packing.PROGRAM:
            self.trials.add(proposal["trial"])
            self._paths = [_Stretch(0, values) for values in proposal["arguments"]["initial"]]

    def best(self, told: Mapping[str, Any]) -> _Stretch:
        """Take in the copies since the last report; returns the path of the best member."""
        before, at = list(self._paths), None
        for line in told["lineage"]:
            if line["step"] != at:  # all copies of a generation are of what there was before it
                before, at = list(self._paths), line["step"]
            self._paths[line["member"]] = _Stretch(line["step"], line["changes"], before[line["parent"]])
        return self._paths[int(told["best"])]


def read_schedule(directory: str | os.PathLike[str]) -> Schedule:
    """The schedule of a search's winner.

    Args:
        directory: of the search.

    Raises:
        RunNameError: there is no search in that directory.
        ConfigError: it has no winner yet, or none that can be followed.
    """
    paths = SearchPaths(directory)
    if not paths.journal.is_file():
        raise RunNameError(f"{Path(directory)} is no directory of a search: it has no {paths.journal.name}.")
    winner = None
    if paths.result.is_file():
        best = json.loads(paths.result.read_text(encoding="utf-8")).get("best")
        winner = None if best is None else best["trial"]
    return schedule_of(read_lines(paths.journal), winner)


def config_at(base: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """The config with dotted keys set to these values.

    Raises:
        ConfigError: it refuses them.
    """
    data = base.model_dump(mode="json")
    problems = put_in(data, base, changes)
    if not problems:
        try:
            made = TrainConfig.model_validate(data)
        except ValidationError as error:
            problems = translate(error, TrainConfig)
        else:
            problems = find_problems(View(made), look_at_task=False)
            if not problems:
                return made
    raise ConfigError([problem.line("the schedule of the search") for problem in problems])


def train_by_schedule(
    source: str | os.PathLike[str] | Mapping[str, Any] | TrainConfig,
    schedule: Schedule,
    *,
    overrides: Sequence[str] = (),
    runs_dir: str | os.PathLike[str] = "runs",
    name: str | None = None,
) -> Run:
    """Train one run, in this process, whose hyper-parameters change at the steps of a schedule.

    Beyond the schedule's last step its last values hold. What it leaves is a run directory, whose config has the last
    values, with the schedule beside it in `schedule.json`.

    Args:
        source: path of a YAML file, a mapping, or a `TrainConfig`; its budget holds.
        schedule: as `read_schedule` returns.
        overrides: `key.path=value`, applied after loading.
        runs_dir: where run directories are made.
        name: in place of the config's.

    Raises:
        ConfigError: the config is wrong, is of more than one worker, or refuses a value of the schedule.
        RunNameError: the name is in use.
        OrchestrayError: the run failed.
    """
    from orchestray.platform import torch_threads
    from orchestray.platform.run.load import load_run
    from orchestray.search.trials.training import TrainingTrial

    base = load_train_config(source, overrides, name=name)
    network = base.strategy.network
    if (workers := network.data * network.tensor * network.pipeline) > 1:
        raise ConfigError(
            f"strategy.network: a schedule is followed by one worker, and the config has {workers}; set data, tensor "
            "and pipeline to 1"
        )
    directory = Path(runs_dir) / base.name
    if directory.exists():
        raise RunNameError(f"The name {base.name!r} is in use: {directory} exists. Use --name for another.")
    configs = [(step, config_at(base, changes)) for step, changes in schedule]
    with torch_threads.using(base.resources.num_threads):  # as many as a trial has
        trial = TrainingTrial(configs[0][1])
        for number, (_, config) in enumerate(configs):
            if number:
                trial.become(config)
            until = configs[number + 1][0] if number + 1 < len(configs) else _WHOLE
            if trial.advance(until).is_over or trial.step < until:
                break  # of itself, or its budget is used
    trial.leave_run(directory)
    lines = [{"from_step": step, "changes": changes} for step, changes in schedule]
    write_atomic(directory / "schedule.json", (dump_json({"schedule": lines}, indent=1) + "\n").encode())
    return load_run(directory)


_WHOLE = 2**62
"""A step that no run comes to: until its budget is used."""


def replay(
    source: str | os.PathLike[str] | Mapping[str, Any] | TrainConfig,
    search_dir: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    runs_dir: str | os.PathLike[str] = "runs",
    name: str | None = None,
    quiet: bool = True,
) -> Run:
    """Train one run by the schedule of a search's winner; arguments and errors as of `train_by_schedule`."""
    from orchestray.platform.run.progress import Progress

    schedule = read_schedule(search_dir)
    run = train_by_schedule(source, schedule, overrides=overrides, runs_dir=runs_dir, name=name)
    with Progress(name=run.name, directory=run.path, quiet=quiet) as progress:
        progress.finish(run.result)
    return run
