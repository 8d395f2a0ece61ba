"""The hyper-parameters of a search's winner as a schedule, and a run that follows it.

The members of a population copy each other, so the winner's weights have passed through several trials. The steps and
the hyper-parameters on this path form a schedule that one run can follow (Jaderberg et al. 2017, section 4.3).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from orchestray.platform.config.problems import translate
from orchestray.platform.errors import ConfigError, RunNameError
from orchestray.platform.run.files import dump_json, write_atomic
from orchestray.platform.run.metrics import read_lines
from orchestray.search.config.trial import put_in
from orchestray.search.methods.base import merit, violation_of
from orchestray.search.methods.population import packing
from orchestray.search.registry.programs import program_name
from orchestray.search.results.paths import SearchPaths
from orchestray.trainers.config.checked_view import View
from orchestray.trainers.config.checks import find_problems
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.schema import TrainConfig

if TYPE_CHECKING:
    from orchestray.trainers.saved.run import Run

Schedule = list[tuple[int, dict[str, Any]]]
"""Steps, rising from 0, and the dotted keys with the values that apply after them."""


@dataclass(frozen=True)
class _Stretch:
    """Values that apply from a step on, and the stretch before."""

    from_step: int
    changes: Mapping[str, Any]
    before: _Stretch | None = None

    def schedule(self) -> Schedule:
        stretches: Schedule = []
        at: _Stretch | None = self
        while at is not None:
            if not stretches or at.from_step < stretches[-1][0]:  # otherwise it ended before it made a step
                stretches.append((at.from_step, dict(at.changes)))
            at = at.before
        return stretches[::-1]


def schedule_of(journal: Sequence[Mapping[str, Any]], trial: int | None = None) -> Schedule:
    """Return the schedule that leads to the best report of a search.

    Args:
        journal: calls to the method with their answers, as in `journal.jsonl`.
        trial: number of the winner, or of the winning member of a packed population; default: the first to report the
            best score, among those that have not failed.

    Raises:
        ConfigError: the search has no report, or the winner inherited weights from a different network.
    """
    paths: dict[int, _Stretch] = {}
    steps: dict[int, int] = {}
    inheriting: set[int] = set()
    over: set[int] = set()
    best: tuple[tuple[float, float], int, _Stretch] | None = None
    packed = _Packed()
    failed = {e["finished"]["trial"] for e in journal if e["call"] == "tell" and e["finished"]["status"] == "failed"}
    for entry in journal:
        if entry["call"] == "ask" and (proposal := entry["proposal"]) is not None:
            paths[proposal["trial"]] = _Stretch(0, proposal["changes"])
            steps[proposal["trial"]] = 0
            if proposal["inherits"]:
                inheriting.add(proposal["trial"])
            packed.begin(proposal)
        decided: list[tuple[int, Mapping[str, Any]]] = []
        if entry["call"] == "report":
            report = entry["report"]
            reporting = int(report["trial"])
            steps[reporting] = report["step"]
            over |= {reporting} if entry.get("is_over") else set()
            is_packed = reporting in packed.trials  # the winner is a member of it, not a trial with that number
            path = packed.best(report["told"]) if is_packed else paths[reporting]
            is_wanted = reporting not in failed if trial is None or is_packed else reporting == trial
            reached = merit(report["score"], violation_of(report.get("violations", ())))
            if is_wanted and (best is None or reached > best[0]):
                best = reached, reporting, path
            decided.append((reporting, entry["decision"]))
        decided += [(released, decision) for released, decision in entry.get("released", ())]
        for member, decision in decided:
            if decision["decision"] == "become" and member not in over:
                source = decision["source"]
                steps[member] = steps[source]
                paths[member] = _Stretch(steps[source], decision["changes"], paths[source])
    if best is None:
        raise ConfigError("there is no schedule to follow: the search has no report yet")
    if best[1] in inheriting:
        raise ConfigError(
            f"the best trial, {best[1]}, began with weights of another network; only searches whose trials copy each "
            "other whole (population_based_training) or begin afresh can be followed"
        )
    return best[2].schedule()


class _Packed:
    """The members of a packed population, tracked by its reports."""

    def __init__(self) -> None:
        self.trials: set[int] = set()
        self._paths: list[_Stretch] = []

    def begin(self, proposal: Mapping[str, Any]) -> None:
        if program_name(proposal["program"]) == packing.PROGRAM:
            self.trials.add(proposal["trial"])
            self._paths = [_Stretch(0, values) for values in proposal["arguments"]["initial"]]

    def best(self, reported: Mapping[str, Any]) -> _Stretch:
        """Process the copies since the last report; return the path of the best member."""
        before, at = list(self._paths), None
        for line in reported["lineage"]:
            if line["step"] != at:  # all copies of a generation refer to the members before it
                before, at = list(self._paths), line["step"]
            self._paths[line["member"]] = _Stretch(line["step"], line["changes"], before[line["parent"]])
        return self._paths[int(reported["best"])]


def read_schedule(directory: str | os.PathLike[str]) -> Schedule:
    """Return the schedule of a search's winner.

    Args:
        directory: directory of the search.

    Raises:
        RunNameError: the directory does not hold a search.
        ConfigError: it has no winner yet, or none whose schedule can be followed.
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
    """Return the config with dotted keys set to these values.

    Raises:
        ConfigError: the values are not valid.
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

    The last values of the schedule apply until the end. The run directory has these values in its config, and the
    schedule in `schedule.json`.

    Args:
        source: path of a YAML file, a mapping, or a `TrainConfig`; its budget applies.
        schedule: schedule as returned by `read_schedule`.
        overrides: `key.path=value`, applied after loading.
        runs_dir: directory for run directories.
        name: name of the run, overriding the config's.

    Raises:
        ConfigError: the config is wrong, has more than one worker, or does not accept a value of the schedule.
        RunNameError: the name is in use.
        OrchestrayError: the run failed.
    """
    from orchestray.platform.process import torch_threads
    from orchestray.search.trials.training import TrainingTrial
    from orchestray.trainers.saved.run import load_run

    base = load_train_config(source, overrides, name=name)
    network = base.strategy.network
    if (workers := network.data * network.tensor * network.pipeline) > 1:
        raise ConfigError(
            f"strategy.network: a schedule is followed by one worker, and the config has {workers}; set data, tensor "
            "and pipeline to 1"
        )
    if base.trackers:
        raise ConfigError("trackers: a run that follows a schedule is not tracked; take it out (trackers=null)")
    directory = Path(runs_dir) / base.name
    if directory.exists():
        raise RunNameError(f"The name {base.name!r} is in use: {directory} exists. Use --name for another.")
    configs = [(step, config_at(base, changes)) for step, changes in schedule]
    with torch_threads.using(base.resources.num_threads):  # like a trial
        trial = TrainingTrial(configs[0][1])
        for number, (_, config) in enumerate(configs):
            if number:
                trial.become(config)
            until = configs[number + 1][0] if number + 1 < len(configs) else _WHOLE
            if trial.advance(until).is_over or trial.step < until:
                break  # its condition to end early is met, or its budget is used
    trial.leave_run(directory)
    lines = [{"from_step": step, "changes": changes} for step, changes in schedule]
    write_atomic(directory / "schedule.json", (dump_json({"schedule": lines}, indent=1) + "\n").encode())
    return load_run(directory)


_WHOLE = 2**62
"""Step that no run reaches, so that it ends by its budget."""


def replay(
    source: str | os.PathLike[str] | Mapping[str, Any] | TrainConfig,
    search_dir: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    runs_dir: str | os.PathLike[str] = "runs",
    name: str | None = None,
    quiet: bool = True,
) -> Run:
    """Train one run by the schedule of a search's winner; see `train_by_schedule` for arguments and errors."""
    from orchestray.platform.terminal.progress import Progress

    schedule = read_schedule(search_dir)
    run = train_by_schedule(source, schedule, overrides=overrides, runs_dir=runs_dir, name=name)
    with Progress(name=run.name, directory=run.path, quiet=quiet) as progress:
        progress.finish(run.result)
    return run
