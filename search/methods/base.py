"""The interface of methods of search: they propose trials, receive their reports, and decide whether they continue.

A method is a deterministic function of its arguments, its seed and the calls made to it: no clock, no global random
numbers, no threads. A search that was killed continues by making the calls in its journal again. The same method runs
under Ray Tune, in a simulation in virtual time and in a test.

Scores are always *maximised*; callers negate those that are to be minimised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from orchestray.search.methods.space import Space

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension
    from orchestray.trainers.config.schema import TrainConfig


@dataclass(frozen=True)
class Proposal:
    """A trial to be run, as JSON values, so that it can be written to the journal and read again."""

    trial: int
    """Number of the trial: 0 for the first that was proposed."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted config keys and the values they get."""
    genome: Any = None
    """The architecture; None: the task's own model."""
    parent: int | None = None
    """Trial that it was made from."""
    inherits: bool = False
    """Start from the parent's weights, as far as names and shapes agree."""
    overlaps: bool = False
    """Take the common part of a weight whose shape differs from the parent's; see `spaces.inherit`."""
    change: str = ""
    """Difference from the parent, in words, for the lineage."""
    steps: int | None = None
    """Training steps; None: the budget's `steps_per_trial`; 0: it is only validated."""
    program: str | None = None
    """Name, or "module:Class", of a `TrialProgram` that replaces ordinary training, such as a network of shared weights
    or a packed population. None: ordinary training."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the program."""


def violation_of(violations: Sequence[float]) -> float:
    """Return the sum of the broken bounds of a trial; 0 if it is feasible."""
    return sum(max(0.0, one) for one in violations)


def merit(score: float, violation: float) -> tuple[float, float]:
    """Return the key by which trials compare, larger for better ones.

    A feasible trial is better than an infeasible one. Of two infeasible ones the less violating is better (Deb, An
    efficient constraint handling method for genetic algorithms, 2000, section 3).
    """
    return -violation, score


@dataclass(frozen=True)
class Report:
    """A report of a trial."""

    trial: int
    step: int
    score: float
    """The first objective, to be maximised."""
    scores: tuple[float, ...] = ()
    """All objectives, each to be maximised; empty: `score` alone."""
    evaluations: tuple[float, ...] = ()
    """Scores of the validations since the previous report, in order, for statistical tests."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """Results of a program for its method, as JSON values."""
    violations: tuple[float, ...] = ()
    """By how much the trial breaks each bound of a metric, relative to the bound; 0 or less where it is kept."""

    @property
    def violation(self) -> float:
        """Sum of the broken bounds; 0 if the trial is feasible."""
        return violation_of(self.violations)


@dataclass(frozen=True)
class Finished:
    """The end of a trial."""

    trial: int
    status: str
    """`succeeded`, `stopped` (by a decision of the method) or `failed`."""
    step: int = 0
    score: float | None = None
    """The best it has reported; None if it failed before it reported anything."""
    scores: tuple[float, ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    violations: tuple[float, ...] = ()
    """Violations at the report of that score."""

    @property
    def violation(self) -> float:
        """Sum of the broken bounds; 0 if the trial is feasible."""
        return violation_of(self.violations)


@dataclass(frozen=True)
class Observation:
    """A trial of an earlier search, as JSON values."""

    changes: Mapping[str, Any]
    """Dotted keys that its point of the space has, with values inside it."""
    genome: Any
    score: float
    scores: tuple[float, ...] = ()
    violations: tuple[float, ...] = ()
    is_trained: bool = True
    """False if it broke a bound so that it was not trained: its score is that of random weights."""

    @property
    def violation(self) -> float:
        """Sum of the broken bounds; 0 if the trial was feasible."""
        return violation_of(self.violations)


@dataclass(frozen=True)
class Continue:
    """The decision to train on."""


@dataclass(frozen=True)
class Stop:
    """The decision to end a trial that is not worth more steps."""

    reason: str


@dataclass(frozen=True)
class Pause:
    """The decision to hold a trial, without a process, until `Method.released` names it."""


@dataclass(frozen=True)
class Exploit:
    """The decision to copy another trial's weights, optimizer and position, and to change the hyper-parameters."""

    source: int
    """Trial whose state is copied; the trial itself, to only change its hyper-parameters."""
    changes: Mapping[str, Any]
    """All dotted keys of the search with their new values."""
    change: str
    """Change in words, for the lineage."""


Decision = Continue | Stop | Pause | Exploit


@dataclass(frozen=True)
class PackedMember:
    """A member of a population that is one trial; its index is its number as a trial."""

    changes: Mapping[str, Any]
    """Current hyper-parameters."""
    score: float | None = None
    """Best reported score; None: it has reported nothing."""
    best_changes: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters at the best score."""
    last_score: float | None = None
    """Score at the last report; None if it had diverged."""
    parent: int | None = None
    """Member that it copied last."""
    change: str = ""
    """Change at that copy, in words."""
    leads: bool = False
    """True if it was the best at the last report: the metrics are from it."""
    is_best: bool = False
    """True if it made the best report of all."""
    news: tuple[tuple[int, int | None, str, Mapping[str, Any]], ...] = ()
    """Changes since the previous report: steps, copied member, change in words, hyper-parameters."""


class Method(ABC):
    """A method of search.

    The life of a trial: `ask` proposes it; after every `next_report` steps it makes a `report`, which is answered by a
    decision; at its end comes `tell`. Between `ask` and `tell` of one trial come the calls of others, in any order.
    """

    is_order_free: ClassVar[bool] = False
    """True if the proposals do not depend on the order in which trials end, so that the best is the same at any
    concurrency."""

    takes_proposer: ClassVar[bool] = False
    """True if the method is built around another one, the argument `proposer`."""

    def __init__(
        self,
        *,
        space: Mapping[str, Dimension],
        architecture: ArchitectureSpace | None = None,
        seed: int = 0,
        trials: int | None = None,
        steps_per_trial: int = 1,
    ) -> None:
        """
        Args:
            space: dimension of each dotted key that is searched, or a `Space`; may be empty with an
                architecture.
            architecture: the space of networks; None: only hyper-parameters are searched.
            seed: seed of all random numbers.
            trials: most trials; None: as many as the method makes (a grid).
            steps_per_trial: training steps of each trial.
        """
        self.space = Space.of(space)
        self.architecture = architecture
        self.seed = seed
        self.trials = trials
        self.steps_per_trial = steps_per_trial

    def check_base(self, base: TrainConfig) -> None:  # noqa: B027 - most methods can train any config
        """Refuse a training config that the method's program cannot train.

        Raises:
            ConfigError: with every reason.
        """

    def judge_by(self, metric: str, mode: str) -> None:  # noqa: B027 - most methods read scores alone
        """Set the first objective, for methods whose program compares networks or members itself.

        Args:
            metric: a validation metric.
            mode: `max` or `min`.
        """

    def begin_with(self, start: Sequence[Mapping[str, Any]]) -> bool:
        """Propose these values first; keys that are left out get those that the method would propose.

        Args:
            start: values of the first trials, each inside the space; keys in them have what they depend on beside them.

        Returns:
            True if the method does.

        Raises:
            ConfigError: there are more of them than it can begin with.
        """
        return False

    def learn(self, observations: Sequence[Observation]) -> bool:
        """Take in trials of earlier searches, before the first proposal; return True if the method does."""
        return False

    def widen(self, space: Space) -> bool:
        """Continue over a space with the same keys that contains the present one; return True if the method does."""
        return False

    @abstractmethod
    def ask(self) -> Proposal | None:
        """Return the next trial; None if `is_done`, or if none can be proposed before another report or end."""

    def allow(self, trials: int | None) -> None:
        """Change the most trials of the search."""
        self.trials = trials

    def next_report(self, trial: int, step: int) -> int:
        """Return the step after `step` at which a trial reports next; by default only at its end."""
        return self.steps_per_trial

    def report(self, report: Report) -> Decision:
        """Receive a report of a trial, including that of its last step, and return a decision.

        At the last step only `Exploit` and `Pause` are carried out, for methods that lengthen trials.
        """
        return Continue()

    @abstractmethod
    def tell(self, finished: Finished) -> None:
        """Receive the end of a trial."""

    def released(self) -> Sequence[tuple[int, Decision]]:
        """Return the decisions on waiting trials that are due.

        It is called after every `tell`, and after every `report` but that of a trial which a condition of its config
        ends there: its `tell` comes first, whatever was decided.
        """
        return ()

    def genome_of(self, proposal: Proposal) -> Any:
        """Return the network of a trial; it is not the proposed one if the trial's program finds another."""
        return proposal.genome

    def members_of(self, trial: int) -> Sequence[PackedMember]:
        """Return the members, at the last report, of a population that is one trial; empty for other trials."""
        return ()

    def tally(self) -> Mapping[str, Any]:
        """Return what the method has counted and what it holds at the end, for `result.json`: JSON values by name."""
        return {}

    def cautions(self) -> Sequence[str]:
        """Return warnings about arguments that are valid but hardly intended, each a sentence with a remedy."""
        return ()

    @property
    def hands_on(self) -> bool:
        """True if trials use the states of others (`Exploit` of another, `inherits`), or depend on them bit by bit.

        Then the state of each report is on disk before the report is handled. So a search that is resumed, or whose
        processes die, has exactly the states that it would have had.
        """
        return False

    @property
    def has_program(self) -> bool:
        """True if its trials are programs (`Proposal.program`) rather than trainings that any trainable could do."""
        return False

    def parents(self) -> Collection[int]:
        """Return the ended trials whose last state a later proposal may use, if more trials are allowed."""
        return ()

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """True if `ask` will never propose a trial again."""


def rng_of(seed: int, *key: int) -> np.random.Generator:
    """Random numbers of their own for a purpose: the same for the same seed and key, independent of any other."""
    return np.random.default_rng([seed, *key])
