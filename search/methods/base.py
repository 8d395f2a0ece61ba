"""What a method of search is: it proposes trials, hears how they do, and decides whether they go on.

A method is a deterministic function of its arguments, its seed and the calls made to it: no clock, no global random
numbers, no threads. So a search that was killed goes on by making the same calls again (they are in its journal), and
the same method runs under Ray Tune, in a simulation in virtual time and in a test.

Scores are always to be *maximised*; who calls has turned them where less is better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from orchestray.search.spaces.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension


@dataclass(frozen=True)
class Proposal:
    """A trial to be run. JSON values only, so that it can be written down and made again."""

    trial: int
    """Its number: 0 for the first that was proposed."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted config keys and the values they get."""
    genome: Any = None
    """The architecture; None: the task's own model."""
    parent: int | None = None
    """The trial it was made from."""
    inherits: bool = False
    """Start from the parent's weights, as far as names and shapes agree."""
    overlaps: bool = False
    """Of a weight that has the parent's name and another shape, take the part that both have; see `spaces.inherit`."""
    change: str = ""
    """What was done to the parent, in words, for the lineage."""
    steps: int | None = None
    """Steps it is trained; None: the budget's `steps_per_trial`; 0: it is only validated."""
    program: str | None = None
    """ "module:Class" of a `TrialProgram` in place of ordinary training: a network of shared weights, a packed
    population. None: ordinary training."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the program."""


@dataclass(frozen=True)
class Report:
    """How a trial does."""

    trial: int
    step: int
    score: float
    """The first objective, to be maximised."""
    scores: tuple[float, ...] = ()
    """All objectives, each to be maximised; empty: `score` alone."""
    evaluations: tuple[float, ...] = ()
    """Scores of the validations since the report before, in order; for tests between two populations of them."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """What a program has to say to its method. JSON values."""


@dataclass(frozen=True)
class Finished:
    """A trial has come to its end."""

    trial: int
    status: str
    """`succeeded`, `stopped` (by a decision of the method) or `failed`."""
    step: int = 0
    score: float | None = None
    """The best it has reported; None if it failed before it reported anything."""
    scores: tuple[float, ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Continue:
    """Train on."""


@dataclass(frozen=True)
class Stop:
    """End the trial: it is not worth more steps."""

    reason: str


@dataclass(frozen=True)
class Wait:
    """Hold the trial, without a process, until `Method.released` names it."""


@dataclass(frozen=True)
class Become:
    """Take the weights, the optimizer and the position of another trial, and train on with other hyper-parameters."""

    source: int
    """The trial whose state is copied; the trial itself to only change its hyper-parameters."""
    changes: Mapping[str, Any]
    """All dotted keys of the search and the values they have from now on."""
    change: str
    """What was done, in words, for the lineage."""


Decision = Continue | Stop | Wait | Become


@dataclass(frozen=True)
class PackedMember:
    """A member of a population that is one trial; as a trial it has the number of its place."""

    changes: Mapping[str, Any]
    """Its hyper-parameters now."""
    score: float | None = None
    """The best it has reported; None: it has reported nothing."""
    best_changes: Mapping[str, Any] = field(default_factory=dict)
    """Its hyper-parameters then."""
    last_score: float | None = None
    """At the last report; None where it had diverged."""
    parent: int | None = None
    """Whom it copied last."""
    change: str = ""
    """What was done then, in words."""
    leads: bool = False
    """Whether it was the best at the last report: the metrics are its."""
    is_best: bool = False
    """Whether the best report of all was its."""
    news: tuple[tuple[int, int | None, str, Mapping[str, Any]], ...] = ()
    """What became of it since the report before: steps, whom it copied, what was done, its hyper-parameters then."""


class Method(ABC):
    """A method of search.

    The life of a trial: `ask` proposes it; after every `next_report` steps it makes a `report`, which is answered by a
    decision; at its end comes `tell`. Between `ask` and `tell` of one trial come the calls of others, in any order.
    """

    is_order_free: ClassVar[bool] = False
    """Whether the proposals are the same whatever the order in which trials end: then so is the best at any
    concurrency."""

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
            space: dimension of each dotted key that is searched; may be empty if there is an architecture.
            architecture: the space of networks; None: only hyper-parameters are searched.
            seed: of everything that is drawn.
            trials: how many there may be in all; None: as many as the method makes (a grid).
            steps_per_trial: steps each is trained.
        """
        self.space = dict(space)
        self.architecture = architecture
        self.seed = seed
        self.trials = trials
        self.steps_per_trial = steps_per_trial

    @abstractmethod
    def ask(self) -> Proposal | None:
        """The next trial; None if none can be proposed before something else is reported or told, or `is_done`."""

    def allow(self, trials: int | None) -> None:
        """From here on there may be so many trials in all."""
        self.trials = trials

    def next_report(self, trial: int, step: int) -> int:
        """The step, after `step`, at which a trial reports next; default: only at its end."""
        return self.steps_per_trial

    def report(self, report: Report) -> Decision:
        """Hear how a trial does; at its last step, too. The decision at its last step is not looked at, save `Become`
        and `Wait` of methods that lengthen trials.
        """
        return Continue()

    @abstractmethod
    def tell(self, finished: Finished) -> None:
        """Hear of the end of a trial."""

    def released(self) -> Sequence[tuple[int, Decision]]:
        """What the trials that wait are to do now, as far as it is known; asked after every report and tell."""
        return ()

    def genome_of(self, proposal: Proposal) -> Any:
        """The network that a trial stands for; another than was proposed where its program finds one."""
        return proposal.genome

    def members_of(self, trial: int) -> Sequence[PackedMember]:
        """The members of a population that is one trial, as its last report told of them; of other trials none."""
        return ()

    def cautions(self) -> Sequence[str]:
        """What its arguments allow and hardly anybody means, each a sentence with what to do about it."""
        return ()

    @property
    def hands_on(self) -> bool:
        """Whether trials take the states of others (`Become` of another, `inherits`), or tell of what they did bit by
        bit: then the state of each report is on the disk before the report is acted on, so that a search that is gone
        on with, or whose processes die, has exactly the states that it would have had.
        """
        return False

    @property
    def has_program(self) -> bool:
        """Whether a trial of it is a whole program of its own (`Proposal.program`), so not a training that somebody
        else could do with the trial's values.
        """
        return False

    def parents(self) -> Collection[int]:
        """The trials that have ended whose last state one may take that is proposed if there may be more."""
        return ()

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `ask` will never propose a trial again."""


def rng_of(seed: int, *key: int) -> np.random.Generator:
    """Random numbers of their own for a purpose: the same for the same seed and key, independent of any other."""
    return np.random.default_rng([seed, *key])
