"""Functions of the comparison of samplers: each alone, with a bound, and with two objectives.

Everything is maximised. A `Case` says how far a finished search is from the best there is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.benchmark import FOLDER

sys.path.insert(0, str(FOLDER.parent / "tests"))
from orchestray.search.methods.base import Proposal
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Integer, Uniform
from support.functions import BRANIN_BEST, BRANIN_SPACE, HARTMANN_BEST, HARTMANN_SPACE, branin, hartmann

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Result of a trial."""

    scores: tuple[float, ...]
    """One for each objective, to be maximised."""
    violation: float | None = None
    """By how much it breaks the bound; 0 or less: it is feasible; None: there is no bound."""


@dataclass(frozen=True)
class Case:
    """A function to be searched."""

    space: Mapping[str, Dimension]
    trials: int
    evaluate: Callable[[Values], Outcome]
    best: tuple[float, ...]
    """The best score; of two objectives the best of each."""
    worst: tuple[float, ...]
    """A score that counts where nothing feasible is found; of two objectives the corner of the hypervolume."""

    @property
    def num_objectives(self) -> int:
        return len(self.best)

    @property
    def has_bound(self) -> bool:
        """True if trials have to keep a bound."""
        return self.evaluate(self.from_units([0.5] * len(self.space))).violation is not None

    def from_units(self, units: Sequence[float]) -> dict[str, Any]:
        """Return the values at a place of the unit cube, whose axes are the keys in order."""
        pairs = zip(self.space.items(), units, strict=True)
        return {key: dimension.from_unit(float(unit)) for (key, dimension), unit in pairs}

    def loss(self, outcomes: Sequence[Outcome]) -> float:
        """Return what is missing at the end of a search.

        With one objective it is the regret: the distance of the best feasible score from the best there is. With two it
        is the part of the box between the best of each objective and the corner `worst` that no trial dominates.
        """
        scores = [one.scores for one in outcomes if one.violation is None or one.violation <= 0] or [self.worst]
        if self.num_objectives == 1:
            return self.best[0] - max(score for (score,) in scores)
        box = math.prod(best - worst for best, worst in zip(self.best, self.worst, strict=True))
        return 1 - _hypervolume(scores, self.worst) / box


def _hypervolume(scores: Sequence[tuple[float, ...]], corner: tuple[float, ...]) -> float:
    """Return the area that pairs of scores dominate above a corner."""
    area, highest = 0.0, corner[1]
    for first, second in sorted(scores, reverse=True):
        if first > corner[0] and second > highest:
            area += (first - corner[0]) * (second - highest)
            highest = second
    return area


# -- one objective -----------------------------------------------------------------------------------------------------

ACKLEY_SPACE: Mapping[str, Dimension] = {f"x{axis}": Uniform(-5.0, 10.0) for axis in range(10)}


def _ackley(values: Values) -> float:
    """Return Ackley's function of ten numbers, negated: one maximum, 0, among very many local ones."""
    at = np.array(list(values.values()))
    waves = math.exp(float(np.cos(2 * math.pi * at).mean()))
    return float(20 * np.exp(-0.2 * np.sqrt((at**2).mean())) - 20 + waves - math.e)


_FLOATS = {f"float{axis}": Uniform(-1.0, 3.0) for axis in range(8)}
_LOGS = {f"log{axis}": Uniform(1e-5, 1.0, is_log=True) for axis in range(4)}
_INTEGERS = {
    "layers": Integer(1, 12),
    "width": Integer(16, 1024, is_log=True),
    "batch": Integer(8, 256, is_log=True),
    "patience": Integer(0, 9),
}
_CHOICES = {
    "optimizer": Choice(("sgd", "adam", "lion")),
    "activation": Choice(("relu", "gelu", "tanh", "elu")),
    "schedule": Choice(("none", "step", "cosine", "linear", "cyclic")),
    "nesterov": Binary(),
}
MIXED_SPACE: Mapping[str, Dimension] = {**_FLOATS, **_LOGS, **_INTEGERS, **_CHOICES}
_FLOATS_AT = np.array([0.3, 1.7, 0.9, -0.4, 2.2, 1.1, 0.1, 2.6])
_FLOATS_WEIGH = np.array([1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02])
_LOGS_AT = {"sgd": (0.7, 0.2, 0.5, 0.6), "adam": (0.45, 0.2, 0.5, 0.6), "lion": (0.25, 0.3, 0.5, 0.6)}
_LOGS_WEIGH = np.array([8.0, 3.0, 1.0, 0.3])
_INTEGERS_AT = {"layers": 7, "width": 192, "batch": 40, "patience": 3}
_INTEGERS_WEIGH = {"layers": 4.0, "width": 2.0, "batch": 1.0, "patience": 0.2}
_CHOICES_COST: Mapping[str, Mapping[Any, float]] = {
    "optimizer": {"sgd": 0.2, "adam": 0.0, "lion": 0.1},
    "activation": {"relu": 0.1, "gelu": 0.0, "tanh": 0.6, "elu": 0.3},
    "schedule": {"none": 0.5, "step": 0.3, "cosine": 0.0, "linear": 0.1, "cyclic": 0.4},
    "nesterov": {True: 0.0, False: 0.1},
}


def _unit(values: Values, key: str) -> float:
    return MIXED_SPACE[key].to_unit(values[key])


def _mixed(values: Values) -> float:
    """Return a smooth score of 20 hyper-parameters, at most 0.

    Few of the keys matter much, as it is with networks. The best learning rates depend on the optimizer, two numbers on
    each other, and one number has several local maxima.
    """
    away = np.array([values[key] for key in _FLOATS]) - _FLOATS_AT
    cost = float(_FLOATS_WEIGH @ away**2) + 0.6 * float(away[0] * away[1]) + 0.2 * (1 - math.cos(5 * away[2]))
    logs = np.array([_unit(values, key) for key in _LOGS]) - _LOGS_AT[values["optimizer"]]
    cost += float(_LOGS_WEIGH @ logs**2)
    for key, weight in _INTEGERS_WEIGH.items():
        cost += weight * (_unit(values, key) - MIXED_SPACE[key].to_unit(_INTEGERS_AT[key])) ** 2
    return -cost - sum(costs[values[key]] for key, costs in _CHOICES_COST.items())


# -- bounds ------------------------------------------------------------------------------------------------------------


def _hartmann_length(values: Values) -> float:
    """Return by how much the point is farther than 1 from the origin (Letham et al., 2019)."""
    return math.hypot(*values.values()) - 1


def _branin_disk(values: Values) -> float:
    """Return by how much the point is outside of a disk that has one of the three maxima (Gelbart et al., 2014)."""
    return ((values["x"] - 2.5) ** 2 + (values["y"] - 7.5) ** 2 - 50) / 50


def _ackley_half(values: Values) -> float:
    """Return by how much the sum of the numbers is above 0; the maximum is there (Eriksson and Poloczek, 2021)."""
    return sum(values.values()) / 10


def _mixed_memory(values: Values) -> float:
    """Return by how much a mock of memory is above what the best point needs, plus 2 %."""
    needed = 2 * _unit(values, "width") + _unit(values, "layers") + _unit(values, "batch")
    needed += sum(_unit(values, key) for key in _FLOATS) / 2 + (0.5 if values["activation"] == "gelu" else 0.0)
    return (needed / (1.02 * _MEMORY) - 1) if _MEMORY else needed


_MEMORY = 0.0
_MEMORY = _mixed_memory({**dict(zip(_FLOATS, _FLOATS_AT, strict=True)), **_INTEGERS_AT, "activation": "gelu"})


# -- two objectives ----------------------------------------------------------------------------------------------------


def _currin(values: Values) -> float:
    """Return the function of Currin et al. (1991) at Branin's point, negated (Belakaria et al., 2019)."""
    x, y = (values["x"] + 5) / 15, values["y"] / 15
    first = 1 - math.exp(-1 / (2 * y)) if y > 0 else 1.0
    polynomials = (2300 * x**3 + 1900 * x**2 + 2092 * x + 60) / (100 * x**3 + 500 * x**2 + 4 * x + 20)
    return -first * polynomials


def _dtlz2(values: Values) -> tuple[float, float]:
    """Return both objectives of DTLZ2, negated; the front is a quarter of a circle (Deb et al., 2002)."""
    first, *others = values.values()
    radius = 1 + sum((x - 0.5) ** 2 for x in others)
    return -radius * math.cos(first * math.pi / 2), -radius * math.sin(first * math.pi / 2)


def _two_ackleys(values: Values) -> tuple[float, float]:
    """Return Ackley's function around 0 and around 1: the best of one is a local maximum of the other."""
    return _ackley(values), _ackley({key: value - 1 for key, value in values.items()})


def _mixed_time(values: Values) -> float:
    """Return a mock of a network's time, negated, at most 0: what is good costs time."""
    cost = 2 * _unit(values, "layers") + 2 * _unit(values, "width") + 1 - _unit(values, "batch")
    cost += sum(_unit(values, key) for key in _FLOATS) / 4
    return -cost - {"relu": 0.0, "gelu": 0.3, "tanh": 0.2, "elu": 0.1}[values["activation"]]


def _branin(values: Values) -> float:
    return branin(Proposal(0, values))


def _hartmann(values: Values) -> float:
    return hartmann(Proposal(0, values))


CASES: Mapping[str, Case] = {
    "Branin": Case(BRANIN_SPACE, 40, lambda v: Outcome((_branin(v),)), (BRANIN_BEST,), (-310.0,)),
    "Hartmann-6": Case(HARTMANN_SPACE, 80, lambda v: Outcome((_hartmann(v),)), (HARTMANN_BEST,), (0.0,)),
    "Ackley-10": Case(ACKLEY_SPACE, 200, lambda v: Outcome((_ackley(v),)), (0.0,), (-25.0,)),
    "mixed-20": Case(MIXED_SPACE, 200, lambda v: Outcome((_mixed(v),)), (0.0,), (-25.0,)),
    "Branin, bound": Case(
        BRANIN_SPACE, 40, lambda v: Outcome((_branin(v),), _branin_disk(v)), (BRANIN_BEST,), (-310.0,)
    ),
    "Hartmann-6, bound": Case(
        HARTMANN_SPACE, 80, lambda v: Outcome((_hartmann(v),), _hartmann_length(v)), (HARTMANN_BEST,), (0.0,)
    ),
    "Ackley-10, bound": Case(ACKLEY_SPACE, 200, lambda v: Outcome((_ackley(v),), _ackley_half(v)), (0.0,), (-25.0,)),
    "mixed-20, bound": Case(MIXED_SPACE, 200, lambda v: Outcome((_mixed(v),), _mixed_memory(v)), (0.0,), (-25.0,)),
    "Branin and Currin": Case(
        BRANIN_SPACE, 40, lambda v: Outcome((_branin(v), _currin(v))), (BRANIN_BEST, -1.18), (-18.0, -6.0)
    ),
    "DTLZ2-6": Case(HARTMANN_SPACE, 80, lambda v: Outcome(_dtlz2(v)), (0.0, 0.0), (-1.1, -1.1)),
    "two Ackleys-10": Case(ACKLEY_SPACE, 200, lambda v: Outcome(_two_ackleys(v)), (0.0, 0.0), (-15.0, -15.0)),
    "mixed-20 and time": Case(
        MIXED_SPACE, 200, lambda v: Outcome((_mixed(v), _mixed_time(v))), (0.0, 0.0), (-6.0, -7.0)
    ),
}
"""Functions by name."""


def drive(
    case: Case, ask: Callable[[], tuple[Any, Values] | None], tell: Callable[[Any, Outcome], None], workers: int
) -> float:
    """Search a case in virtual time, every trial as long as another, and return the loss.

    Args:
        case: the function.
        ask: returns the next trial, its values beside whatever names it; None: it waits for one that runs.
        tell: takes the outcome of the trial of that name.
        workers: trials at once.
    """
    running: list[tuple[Any, Values]] = []
    outcomes: list[Outcome] = []
    asked = 0
    while len(outcomes) < case.trials:
        while len(running) < workers and asked < case.trials and (proposed := ask()) is not None:
            running.append(proposed)
            asked += 1
        name, values = running.pop(0)
        outcomes.append(case.evaluate(values))
        tell(name, outcomes[-1])
    return case.loss(outcomes)
