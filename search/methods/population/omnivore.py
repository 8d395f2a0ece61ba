"""Omnivore: a grid of momentum, learning rate and staleness, searched repeatedly while one model trains.

S. Hadjis, C. Zhang, I. Mitliagkas, C. Re, "Omnivore: An Optimizer for Multi-device Deep Learning on CPUs and GPUs",
2016, section 5 and algorithm 1. At every retune each point of the grid trains briefly from the same state,
and the best trains on until the next retune.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Continue, Decision, Exploit, Finished, Method, Pause, Proposal, Report, Stop
from orchestray.search.methods.population.explore import describe_changes

_MOST_VALUES = 1_000
"""Most values of a key in a grid of which all points train at once."""


@dataclass(frozen=True)
class Retune:
    """A choice among the points of the grid."""

    step: int
    """Step at which the choice was made."""
    scores: Mapping[int, float]
    """Score of each point's trial after the probe."""
    winner: int
    changes: Mapping[str, Any]
    """Values with which training continues."""


class Omnivore(Method):
    """A trial for each point of the grid; all probe together, then one of them trains on while the others wait.

    Every `every_steps` steps all trials copy the state of the one that trained, each with the values of its own point.
    After `probe_steps` the one with the best score trains on; its training in the probe is kept. The proposals and the
    outcome are the same at any concurrency, since all wait for each other. A point whose process failed is not tried
    again, nor one that a condition of its config has ended in a probe. Where that ends the one that trains on, it ends
    the search.
    """

    is_order_free: ClassVar[bool] = True

    def __init__(self, *, every_steps: int = 100, probe_steps: int = 10, **arguments: Any) -> None:
        """Take the parameters of `params.Omnivore` and the arguments of `Method`.

        Each key of the space needs values that can be counted (`choice`, `integer`, `binary`), such as those of
        `train.optimizer.momentum`, `train.optimizer.lr` or `strategy.exchange.staleness`.

        Raises:
            ConfigError: an argument is missing, or two do not fit each other.
        """
        super().__init__(**arguments)
        self.every_steps, self.probe_steps = every_steps, probe_steps
        self.points = _points(self)
        self.retunes: list[Retune] = []
        self._num_proposed = 0
        self._alive: set[int] = set()
        self._held: dict[int, float] = {}
        """Maps each waiting trial to the score that it reported last."""
        self._leader: int | None = None
        """Trial that trains on; None: all probe."""
        self._probed_at = 0
        """Step of the last probe."""
        self._due: list[tuple[int, Decision]] = []

    @property
    def hands_on(self) -> bool:
        return True

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        trial = self._num_proposed
        self._num_proposed += 1
        self._alive.add(trial)
        return Proposal(trial, changes=self.points[trial], change="a point of the grid")

    def next_report(self, trial: int, step: int) -> int:
        begin = step - step % self.every_steps
        probed = begin + self.probe_steps
        return min(probed if step < probed else begin + self.every_steps, self.steps_per_trial)

    def report(self, report: Report) -> Decision:
        if report.step >= self.steps_per_trial:
            return Continue()
        if report.trial == self._leader:  # all others probe from its state
            self._leader = None
            self._due += [(trial, self._as_point(trial, report.trial)) for trial in sorted(self._held)]
            self._held.clear()
            return Continue()
        self._held[report.trial] = report.score if math.isfinite(report.score) else -math.inf  # a probe that diverged
        self._probed_at = report.step
        return Pause()

    def _as_point(self, trial: int, source: int) -> Exploit:
        before, changes = self.points[source], self.points[trial]
        return Exploit(source, changes, f"probes from trial {source}; {describe_changes(before, changes)}")

    def _choose(self) -> None:
        """Let the best trial train on once all have probed; among equals the first of the grid."""
        if self._num_proposed < len(self.points) or set(self._held) != self._alive:
            return
        if not self._held:
            return
        winner = max(self._held, key=lambda trial: (self._held[trial], -trial))
        self.retunes.append(Retune(self._probed_at, dict(self._held), winner, self.points[winner]))
        del self._held[winner]
        self._leader = winner
        self._due.append((winner, Continue()))

    def released(self) -> Sequence[tuple[int, Decision]]:
        self._choose()
        due, self._due = self._due, []
        return due

    def tell(self, finished: Finished) -> None:
        trial = finished.trial
        copying = [other for other, decision in self._due if isinstance(decision, Exploit) and decision.source == trial]
        was_leader = trial == self._leader or bool(copying)
        self._alive.discard(trial)
        self._held.pop(trial, None)
        if was_leader and finished.status != "failed":
            others = [*copying, *self._held]
            self._due = [(other, Stop("another point of the grid was trained to the end")) for other in others]
            self._held.clear()
        elif was_leader:  # the others still have the state after the last probe
            self._leader = None

    @property
    def is_done(self) -> bool:
        return self._num_proposed == len(self.points)


def _points(method: Omnivore) -> list[dict[str, Any]]:
    problems = []
    if method.architecture is not None:
        problems.append("search.architecture: omnivore tunes the training of one network; take architecture out")
    if not method.space:
        problems.append("search.space: omnivore has nothing to tune; name train.optimizer.momentum and its values")
    counts = {key: dimension.num_values for key, dimension in method.space.items()}
    uncounted = [key for key, count in counts.items() if count is None or count > _MOST_VALUES]
    problems += [f"search.space: {key}: omnivore tries a grid; give its values with type: choice" for key in uncounted]
    if method.probe_steps >= method.every_steps:
        problems.append(
            f"search.method.probe_steps: a probe of {method.probe_steps} steps must be shorter than every_steps: "
            f"{method.every_steps}"
        )
    if problems:
        raise ConfigError(problems)
    points = [point for point in method.space.points() if method.space.is_allowed(point)]
    if method.trials is not None and len(points) > method.trials:
        raise ConfigError(
            f"search.space: its grid has {len(points)} points, and the budget {method.trials} trials; use "
            f"budget.trials: {len(points)}"
        )
    return points
