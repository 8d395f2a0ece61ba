"""A whole search without Ray: its processes are hosts of this one, which take turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.config.overrides import apply
from orchestray.search.checkpoints.state_files import StateFiles
from orchestray.search.config.trial import trial_config
from orchestray.search.engine.controller import SearchController
from orchestray.search.engine.messages import TrialLimits, TrialTask
from orchestray.search.engine.objective import Objective, Objectives, objectives_of
from orchestray.search.engine.session import MemoryJournal, MethodSession
from orchestray.search.engine.trial_worker import TrialHost
from orchestray.search.methods.base import Method
from orchestray.search.registry.check import method_of
from orchestray.search.results.schema import TrialChange, TrialLine
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.schema import TrainConfig

if TYPE_CHECKING:
    from orchestray.search.config.schema import SearchConfig
    from orchestray.search.engine.session import Journal
    from orchestray.search.results.writer import SearchRecords

ACCURACY = Objectives([Objective("accuracy", "max")])


def base(**task: Any) -> dict[str, Any]:
    """Return a config that trains in milliseconds."""
    return {
        "name": "trial",
        "task": {"type": "support.tiny_task:TinyTask", **task},
        "train": {"batch_size": 8, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
    }


def make_config(changes: Mapping[str, Any], genome: Any, steps: int, trial: int) -> TrainConfig:
    """Make a config as the front does."""
    data = base()
    data["name"], data["train"]["steps"] = f"trial-{trial}", max(1, steps)
    for key, value in changes.items():
        assert apply(data, tuple(key.split(".")), value) is None
    return load_train_config(data)


def begin(search: SearchController) -> TrialTask | None:
    """Return the first task of a free process; None if there is nothing for it now."""
    while (trial := search.next_trial()) is not None:
        if (task := search.first_task(trial)) is not None:
            return task
    return None


class MemoryRecords:
    """Records of a search, in lists."""

    def __init__(self) -> None:
        self.lines: dict[int, dict[str, Any]] = {}
        self.reports: list[tuple[int, int, dict[str, float]]] = []
        self.nodes: list[tuple[int, int | None, int, str]] = []

    def report(self, trial: int, step: int, metrics: Mapping[str, float], **more: Any) -> None:
        self.reports.append((trial, step, dict(metrics)))

    def finished(self, line: TrialLine) -> None:
        assert line.trial not in self.lines
        self.lines[line.trial] = line.to_json()

    def reopen(self, trials: Collection[int]) -> None:
        for trial in trials:
            self.lines.pop(trial, None)

    def lineage(self, trial: int, parent: int | None, step: int, change: str, **more: Any) -> None:
        self.nodes.append((trial, parent, step, change))


class Loop:
    """A search under way."""

    def __init__(
        self,
        method: Method,
        directory: Path,
        *,
        parallel: int = 1,
        journal: Journal | None = None,
        objectives: Objectives = ACCURACY,
        make: Callable[..., TrainConfig] = make_config,
        unit: str = "steps",
        records: Any = None,
        **rules: Any,
    ) -> None:
        self.journal: Any = journal or MemoryJournal()
        self.records: Any = records or MemoryRecords()
        self.files = StateFiles(directory)
        self.parallel = parallel
        self.rules = TrialLimits(objectives, str(directory), **{"save_every_s": 0.0, **rules})
        self.hosts = [TrialHost(self.rules) for _ in range(parallel)]
        self.shown: list[TrialChange] = []
        """Changes that a display was shown."""
        self.conductor = SearchController(
            MethodSession(method, self.journal),
            make,
            objectives,
            self.records,
            self.files,
            parallel=parallel,
            unit=unit,
            on_change=self.shown.append,
        )
        self.orders: dict[int, TrialTask] = {}
        self.begun: list[TrialTask] = []

    def step(self) -> bool:
        """Take one answer of one process; return True if there was anything to do."""
        for number in range(self.parallel):
            if number not in self.orders and (order := begin(self.conductor)) is not None:
                self.orders[number] = order
                self.begun.append(order)
        if not self.orders:
            return False
        number = min(self.orders, key=lambda number: (self.orders[number].until, number))
        further = self.conductor.receive(self.hosts[number].work(self.orders.pop(number)))
        if further is not None:
            self.orders[number] = further
        return True

    def renew(self, number: int) -> None:
        """End the process of that number, with the order it has."""
        self.hosts[number].close()
        self.hosts[number] = TrialHost(self.rules)
        self.conductor.lost(self.orders.pop(number).trial)

    def run(self) -> Loop:
        while self.step():
            pass
        assert self.conductor.is_over
        return self

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        self.hosts = []


def loop_of(config: SearchConfig, records: SearchRecords, **rules: Any) -> Loop:
    """Return a search of a config as a user has it; it leaves in its directory all of a search up to its last trial.

    `orchestray.search` with `resume` finds nothing more to train there: it ends the search, without Ray.
    """

    def make(changes: Mapping[str, Any], genome: Any, steps: int, trial: int) -> TrainConfig:
        return trial_config(config, changes, genome, steps, trial=trial)

    return Loop(
        method_of(config),
        records.paths.trial_states,
        parallel=config.search.parallel,
        journal=records.journal,
        objectives=objectives_of(config),
        make=make,
        unit=config.unit,
        records=records,
        **rules,
    )
