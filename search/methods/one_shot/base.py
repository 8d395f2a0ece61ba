"""The base of the methods that train one set of weights for all networks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from orchestray.platform.config.metric_names import mode_of_metric
from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Continue, Decision, Finished, Method, Proposal, Report, rng_of
from orchestray.search.spaces.architectures.base import key_of
from orchestray.search.spaces.architectures.measures import MEASURES

_STEPS_TIMES = 4
_REPORTS = 5
"""Reports while the shared weights are trained: each finds the best network so far, and validates it."""

_LOSSES = ("loss", "train_loss")
"""Metrics that are not the task's own: networks are rewarded by minus the loss of the data that judges them."""


class OneShot(Method):
    """A search whose first trial trains the shared weights and finds networks, which are then trained separately.

    The first trial's proposal has a genome only so that its config names the space; its result is the best network that
    it found. Later proposals depend on the result of the first trial alone, not on any order.
    """

    is_order_free = True
    program: ClassVar[str]
    """Name of the first trial's program."""
    name: ClassVar[str]

    def __init__(
        self,
        *,
        search_steps: int | None = None,
        finalists: int = 2,
        inherit: bool = False,
        architecture_part: float = 0.5,
        **common: Any,
    ) -> None:
        """Take the parameters of `params.OneShot` and the arguments of `Method`.

        Raises:
            ConfigError: the space does not support shared weights, or hyper-parameters are searched, too.
        """
        super().__init__(**common)
        if self.architecture is None:
            raise ConfigError(f"search.architecture: is needed by the method {self.name}: the space of networks")
        if self.space:
            raise ConfigError(
                f"search.space: the method {self.name} finds an architecture in one training and tries no other values "
                f"of {', '.join(self.space)}; search them afterwards, with the network it found, by another method"
            )
        self._check_space()
        self.search_steps = search_steps or _STEPS_TIMES * self.steps_per_trial
        self._finalists, self._inherit, self._architecture_part = finalists, inherit, architecture_part
        self._queue: deque[Any] = deque()
        self._proposed = 0
        self._is_found = False
        self._best: Any = None
        self._best_score: float | None = None
        self._reported: Mapping[str, Any] = {}
        """Values that the last report of the program had beside the networks."""

    def _check_space(self) -> None:
        """Raise an error for a space that the program cannot train."""

    def _arguments(self) -> Mapping[str, Any]:
        """Return the arguments of the program that other programs do not have."""
        return {}

    def tally(self) -> Mapping[str, Any]:
        """Return the values that the program reported at the end of the shared training, but for the networks."""
        return self._reported

    @property
    def hands_on(self) -> bool:
        return self._inherit

    @property
    def has_program(self) -> bool:
        return True

    def parents(self) -> Collection[int]:
        return (0,) if self._inherit and self._queue else ()

    @property
    def is_done(self) -> bool:
        is_spent = self.trials is not None and self._proposed >= self.trials
        return is_spent or (self._is_found and not self._queue)

    def ask(self) -> Proposal | None:
        if self.is_done or (self._proposed and not self._queue):
            return None
        trial = self._proposed
        self._proposed += 1
        if trial:
            change = "found with shared weights, which it starts from" if self._inherit else "found with shared weights"
            return Proposal(trial, genome=self._queue.popleft(), parent=0, inherits=self._inherit, change=change)
        assert self.architecture is not None  # checked when it was made
        common = {"seed": self.seed, "finalists": self._finalists, "architecture_part": self._architecture_part}
        return Proposal(
            0,
            genome=self.architecture.sample(rng_of(self.seed)),
            change="weights shared by all networks",
            steps=self.search_steps,
            program=self.program,
            arguments={**common, **self._arguments()},
        )

    def next_report(self, trial: int, step: int) -> int:
        if trial:
            return self.steps_per_trial
        number = step * _REPORTS // self.search_steps + 1
        return math.ceil(number * self.search_steps / _REPORTS)

    def genome_of(self, proposal: Proposal) -> Any:
        """Return the network of a trial: for the first trial, that of its best report, if any."""
        return self._best if proposal.trial == 0 and self._best is not None else proposal.genome

    def report(self, report: Report) -> Decision:
        if report.trial == 0:
            self._hear(report)
        return Continue()

    def tell(self, finished: Finished) -> None:
        if finished.trial == 0:
            self._is_found = True

    def _hear(self, report: Report) -> None:
        """Record the best network so far and, at the end, the networks to train separately."""
        genomes = report.told.get("genomes", ())
        self._reported = {name: value for name, value in report.told.items() if name != "genomes"}
        if not genomes:
            return
        if self._best_score is None or report.score > self._best_score:
            self._best, self._best_score = genomes[0], report.score
        if report.step < self.search_steps or self._queue or self._is_found:
            return
        assert self.architecture is not None  # checked when it was made
        different = {key_of(self.architecture, genome): genome for genome in reversed(genomes)}
        self._queue.extend(list(reversed(different.values()))[: self._finalists])


def reward_of(given: str | None, metric: str, mode: str) -> Mapping[str, Any]:
    """Return the arguments of a program that define the reward of a network; empty for the program's own default.

    Args:
        given: metric in the method's section, which takes precedence; maximised unless its name says otherwise.
        metric: the search's first objective; for a loss or a measure of the network the reward is minus the loss.
        mode: `max` or `min`.
    """
    if (given or metric) in _LOSSES:
        return {"metric": None}
    if given is not None:
        direction = mode if given == metric else mode_of_metric(given)
        return {"less_is_better": True} if direction == "min" else {}
    if metric in MEASURES:
        return {}
    return {"metric": metric, "less_is_better": mode == "min"}
