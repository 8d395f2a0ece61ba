"""Machines rented by the hour at a price that moves: a cluster of one size, and one that grows while they are cheap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ON_DEMAND = 1.0
"""Price of a machine for an hour that is always there; spot prices stay below it."""
_USUAL, _PULL, _SPREAD = 0.3, 0.1, 0.25
_HALVINGS = 40


def price_trace(hours: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """Return the price of each hour: its logarithm wanders around that of 0.3, and never passes `ON_DEMAND`."""
    logs = np.empty(hours)
    level = 0.0
    for hour, step in enumerate(draw.normal(0.0, _SPREAD, hours)):
        level += step - _PULL * level
        logs[hour] = level
    return np.minimum(_USUAL * np.exp(logs), ON_DEMAND)


@dataclass(frozen=True)
class Job:
    """A training that is to be done.

    Args:
        work: hours of one machine.
        speeds: work an hour of 0, 1, 2, ... machines; it grows with them.
        deadline_hours: hours in which it has to be done.
        resize_hours: part of an hour that a change of the number of machines costs.
    """

    work: float
    speeds: Sequence[float]
    deadline_hours: int
    resize_hours: float = 0.0

    def __post_init__(self) -> None:
        if self.work > (self.deadline_hours - self.resize_hours) * self.speeds[-1]:
            raise ValueError(f"{len(self.speeds) - 1} machines do not do {self.work} in {self.deadline_hours} hours")


@dataclass(frozen=True)
class Bill:
    """The cost of a training.

    Args:
        cost: sum of the prices.
        hours: hours until the work was done.
        resizes: changes of the number of machines, the first start included.
        machines: machines of each hour.
    """

    cost: float
    hours: float
    resizes: int
    machines: Sequence[int]


Choice = Callable[[int, float, float], int]
"""Returns the number of machines for an hour, from its number, the price, and the work that is left."""


def rent(job: Job, prices: Sequence[float] | NDArray[np.float64], choose: Choice) -> Bill:
    """Train, hour after hour, with the machines that are chosen for each; the last hour is paid in part.

    Raises:
        ValueError: the choice does not finish the work in the hours that have prices.
    """
    left, cost, resizes, taken = job.work, 0.0, 0, list[int]()
    for hour, price in enumerate(prices):
        count = choose(hour, float(price), left)
        is_new = count != (taken[-1] if taken else 0)
        resizes += is_new
        taken.append(count)
        lost = job.resize_hours if is_new and count else 0.0
        done = (1 - lost) * job.speeds[count]
        if done >= left:
            part = lost + left / job.speeds[count]
            return Bill(cost + part * count * float(price), hour + part, resizes, taken)
        left -= done
        cost += count * float(price)
    raise ValueError(f"{left:.3g} of {job.work:.3g} are left after {len(prices)} hours")


def fixed(count: int) -> Choice:
    """Return the choice of one number of machines for all hours."""
    return lambda _hour, _price, _left: count


def elastic(job: Job, worth: float) -> Choice:
    """Return the choice of the machines that gain most at each price, and of all when the deadline asks for it.

    Args:
        job: the job.
        worth: price that a unit of work is worth.
    """
    before = 0

    def choose(hour: int, price: float, left: float) -> int:
        nonlocal before
        rest_hours = job.deadline_hours - hour - 1 - 2 * job.resize_hours  # of the next hour's start, and of this one's
        if left > max(0.0, rest_hours) * job.speeds[-1]:
            before = len(job.speeds) - 1
            return before
        gains = [
            worth * speed * (1 - job.resize_hours * (count not in (0, before))) - price * count
            for count, speed in enumerate(job.speeds)
        ]
        before = int(np.argmax(gains))
        return before

    return choose


def worth_of_work(job: Job, prices: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the least worth of work at which `elastic` keeps the deadline by its gains alone, on known prices."""
    low, high = 0.0, ON_DEMAND * len(job.speeds) / job.speeds[1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        choose = elastic(Job(job.work, job.speeds, len(prices) * 2, job.resize_hours), middle)
        try:
            rent(job, prices[: job.deadline_hours], choose)
            high = middle
        except ValueError:
            low = middle
    return high


_MACHINES, _DAYS, _TRACES = 8, 3, 100
_SLOWER = 0.05
"""Part of its speed that each machine loses to the exchange with each other."""


def show_bills() -> tuple[list[list[str | float]], float, int]:
    """Return a row for each kind of cluster, the part of two machines' cost that elasticity saves, and the traces.

    A row has the mean cost, the highest, the mean hours, and the mean number of resizes.
    """
    speeds = [count / (1 + _SLOWER * max(0, count - 1)) for count in range(_MACHINES + 1)]
    hours = 24 * _DAYS
    job = Job(100.0, speeds, hours, resize_hours=0.1)
    bills: dict[str, list[Bill]] = {}
    for seed in range(_TRACES):
        prices = price_trace(2 * hours, np.random.default_rng(seed))
        past, coming = prices[:hours], prices[hours:]
        choices = {f"{count} machines": fixed(count) for count in (2, 4, 8)}
        choices["elastic"] = elastic(job, worth_of_work(job, past))
        choices["elastic, prices known"] = elastic(job, worth_of_work(job, coming))
        for name, choose in choices.items():
            bills.setdefault(name, []).append(rent(job, coming, choose))
    rows: list[list[str | float]] = [
        [
            name,
            float(np.mean([bill.cost for bill in each])),
            max(bill.cost for bill in each),
            float(np.mean([bill.hours for bill in each])),
            float(np.mean([bill.resizes for bill in each])),
        ]
        for name, each in bills.items()
    ]
    costs = {name: np.mean([bill.cost for bill in each]) for name, each in bills.items()}
    return rows, float(1 - costs["elastic"] / costs["2 machines"]), _TRACES
