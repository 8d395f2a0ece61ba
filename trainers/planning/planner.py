"""Plans for a config: each scheme that its rules allow, predicted, corrected by the record, and ranked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.process import gc_control
from orchestray.platform.usercode.beside import find_once
from orchestray.trainers.planning.candidates import Candidate, candidates
from orchestray.trainers.planning.goodput import goodput_of
from orchestray.trainers.planning.predict import Predictor, refuse_unknown

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainConfig
    from orchestray.trainers.planning.cluster import Cluster
    from orchestray.trainers.planning.measuring import Measurements
    from orchestray.trainers.planning.plans import Plan
    from orchestray.trainers.planning.record import Record

_WORTH = 1.03
"""Speed-up over one process from which on more of them are worth it: a smaller one is within the errors."""
_SPARE_MEMORY = 0.95
"""Part of a machine's memory that workers may take."""
AS_IT_STANDS = "as it stands"


@dataclass(frozen=True)
class Unfit:
    """A scheme without a plan, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Plans:
    """Plans for a config, the fastest first.

    Args:
        plans: plans that fit the memory.
        unfit: schemes that do not fit the model or the memory.
        this: the config as it stands; None: it has no plan.
        num_disturbed: measurements during which other programs took much of this machine.
        num_recorded: runs of the record that correct them.
    """

    plans: tuple[Plan, ...]
    unfit: tuple[Unfit, ...] = ()
    this: Plan | None = None
    num_disturbed: int = 0
    num_recorded: int = 0

    @property
    def best(self) -> Plan | None:
        """The fastest plan that keeps the result of a single process; one process itself if no other is worth it.

        Plans that were tried are compared by what their steps took, and one that was not tried is not chosen.
        """
        exact = [plan for plan in self.plans if plan.keeps_result]
        compared = [plan for plan in exact if plan.tried_s is not None] or exact
        if not compared:
            return None
        times_s = [(plan.tried_s or plan.step_s) / plan.samples for plan in compared]
        fastest_s = min(times_s)
        for plan, time_s in zip(compared, times_s, strict=True):
            if plan.num_workers == 1 and not plan.num_servers and time_s / fastest_s < _WORTH:
                return plan
        return compared[times_s.index(fastest_s)]

    @property
    def cheapest(self) -> Plan | None:
        """The plan with the lowest price of those that keep the result of a single process; None: there is no price."""
        exact = [(plan.price, place) for place, plan in enumerate(self.plans) if plan.keeps_result]
        priced = [(price, place) for price, place in exact if price is not None]
        return self.plans[min(priced)[1]] if priced else None

    def find(self, name: str) -> Plan:
        """Return the plan of a name, or of a place in the table, from 1.

        Raises:
            ConfigError: there is none.
        """
        if name.isdigit() and 1 <= int(name) <= len(self.plans):
            return self.plans[int(name) - 1]
        for plan in (*self.plans, *([self.this] if self.this else [])):
            if plan.name == name:
                return plan
        for unfit in self.unfit:
            if unfit.name == name:
                raise ConfigError(f"{name} has no plan: {unfit.why}")
        raise ConfigError(f"there is no plan {name!r}; name one of the table, or its place from 1 to {len(self.plans)}")


class Planner:
    """A planner for machines of one kind.

    Args:
        cluster: machines to plan for.
        measurements: measurements on this machine.
        record: errors of earlier predictions.
        mtbf_h: mean hours between failures of a run; None: plans have no goodput.
        budget: most that a run may cost, in the unit of the machine's `price_per_worker_hour`; None: any price.
    """

    def __init__(
        self,
        cluster: Cluster,
        measurements: Measurements,
        record: Record,
        *,
        mtbf_h: float | None = None,
        budget: float | None = None,
    ) -> None:
        self._cluster, self._measurements, self._record = cluster, measurements, record
        self._mtbf_h, self._budget = mtbf_h, budget
        self._predictor = Predictor(cluster, measurements)
        self._correction, self._start_s = cache(record.correction), cache(record.start_s)  # many plans are alike

    def this(self, config: TrainConfig) -> Plan:
        """Return the prediction of a config as it stands.

        Raises:
            ConfigError: the config does not fit the task or the model, or its scheme is not predicted.
            TrainingError: the task's code failed.
        """
        return self._plan(config, Candidate(AS_IT_STANDS))

    @gc_control.pause()  # to look for cycles among what torch and Ray made would take as long as 200 plans
    def plans(
        self, config: TrainConfig, num_workers: int, report: Callable[[int, int], None] = lambda _done, _all: None
    ) -> Plans:
        """Return the plans for a config.

        Args:
            config: the config; all but its strategy and what belongs to it stays.
            num_workers: most workers.
            report: called with the numbers of schemes done and in all.

        Raises:
            ConfigError: no scheme fits; the message says by how much, and what would help.
        """
        if config.train.solver is not None:
            refuse_unknown(config)  # whatever the strategy
        made: list[Plan] = []
        unfit: list[Unfit] = []
        with find_once():
            schemes = candidates(config, num_workers, self._cluster.machine.cores, self._cluster.num_nodes)
            for number, (candidate, applied) in enumerate(schemes):
                report(number, len(schemes))
                try:
                    made.append(self._plan(applied, candidate))
                except OrchestrayError as error:
                    unfit.append(Unfit(candidate.name, str(error).removeprefix("config: ")))
        report(len(schemes), len(schemes))
        fitting = [plan for plan in made if self._needed(plan) <= self._limit]
        unfit += [Unfit(plan.name, self._too_large(plan)) for plan in made if self._needed(plan) > self._limit]
        if not fitting:
            raise ConfigError(self._nothing_fits(made, unfit))
        if self._budget is not None:
            fitting, dear = self._divided_by_budget(fitting, self._budget)
            unfit += dear
        try:
            this = self.this(config)
        except OrchestrayError as error:
            this = None
            unfit.append(Unfit(AS_IT_STANDS, str(error).removeprefix("config: ")))
        ranked = sorted(fitting, key=lambda plan: plan.step_s / plan.samples)
        return Plans(tuple(ranked), tuple(unfit), this, self._measurements.num_disturbed, len(self._record.entries))

    def _plan(self, config: TrainConfig, candidate: Candidate) -> Plan:
        refuse_unknown(config)
        plan = self._predictor.predict(config, candidate.name, candidate.changes)
        plan = plan.corrected(self._correction(plan.traits))
        plan = replace(plan, start_s=self._start_s(plan.num_workers + plan.num_servers))
        if (price := self._cluster.machine.price_per_worker_hour) is not None and plan.num_steps:
            seconds = plan.start_s + plan.num_steps * plan.step_s
            plan = replace(plan, price=price * (plan.num_workers + plan.num_servers) * seconds / 3600)
        if self._mtbf_h is None:
            return plan
        disk = self._cluster.machine.disk_bytes_per_s
        return replace(plan, goodput=goodput_of(plan, mtbf_h=self._mtbf_h, disk_bytes_per_s=disk))

    @property
    def _limit(self) -> float:
        return _SPARE_MEMORY * self._cluster.machine.memory_bytes

    def _needed(self, plan: Plan) -> int:
        """Return the bytes that the workers and servers of one machine take."""
        workers = self._cluster.workers_of_node(plan.num_workers)
        return plan.memory.resident * (workers + plan.num_servers)

    def _too_large(self, plan: Plan) -> str:
        return f"its workers need {_gb(self._needed(plan))} a machine, which has {_gb(self._limit)} for them"

    def _divided_by_budget(self, plans: Sequence[Plan], budget: float) -> tuple[list[Plan], list[Unfit]]:
        """Return the plans within the budget, and those beyond it with what they cost."""
        if self._cluster.machine.price_per_worker_hour is None:
            text = "give --price-per-hour, or set price_per_worker_hour in the profile of the machine"
            raise ConfigError(f"--budget needs the price of a worker: {text}")
        prices = [(plan, plan.price) for plan in plans if plan.price is not None]
        if not prices:
            raise ConfigError("--budget needs the length of the run: set train.steps or train.epochs")
        within = [plan for plan, price in prices if price <= budget]
        if not within:
            least, price = min(prices, key=lambda each: each[1])
            helps = "fewer train.steps or train.epochs, or a smaller price_per_worker_hour"
            raise ConfigError(
                f"no scheme fits the budget of {budget:g}: the cheapest, {least.name}, costs {price:.4g}, "
                f"{price - budget:.4g} more; what would help: {helps}"
            )
        dear = [
            Unfit(plan.name, f"a run costs {price:.4g}, more than the budget of {budget:g}")
            for plan, price in prices
            if price > budget
        ]
        return within, dear

    def _nothing_fits(self, made: Sequence[Plan], unfit: Sequence[Unfit]) -> str:
        if not made:
            first: dict[str, str] = {}
            for each in unfit:
                first.setdefault(each.why, each.name)
            if len(first) == 1:
                return f"no scheme fits this config, each for one reason: {unfit[0].why}"
            return "no scheme fits this config: " + "; ".join([f"{name}: {why}" for why, name in first.items()][:3])
        least = min(made, key=self._needed)
        lacks = self._needed(least) - self._limit
        helps = "a smaller train.batch_size or a larger train.accumulate, more machines (--nodes), or more memory"
        return (
            f"no scheme fits: the smallest, {least.name}, needs {_gb(self._needed(least))} a machine, "
            f"{_gb(lacks)} more than there are; what would help: {helps}"
        )


def why(one: Plan, other: Plan) -> list[tuple[str, float, float]]:
    """Return the parts of two plans' times of a sample, in seconds, those that differ most first."""
    parts = []
    for name in ("compute_s", "exchange_s", "bubble_s", "optimizer_s", "loop_s"):
        a, b = (getattr(plan.parts, name) / plan.samples for plan in (one, other))
        parts.append((name.removesuffix("_s"), a, b))
    return sorted(parts, key=lambda part: -abs(part[1] - part[2]))


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
