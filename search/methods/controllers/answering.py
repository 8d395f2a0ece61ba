"""A search as a sequence of choices that a method answers one by one, and the scores of the answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Proposal
from orchestray.search.methods.space import MAX_DRAWS, Space
from orchestray.search.spaces.architectures.base import key_of
from orchestray.search.spaces.architectures.choices import ChoiceSpace, Decision
from orchestray.search.spaces.dimensions import Choice
from orchestray.search.spaces.registry import OwnSpace

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension

LEVELS = 8
"""Most values that are offered of a range of numbers, evenly over it; of a choice all are."""

_NUM_KEYS = 4096

Pick = Callable[[str, Sequence[Any]], int]


def choice_space(architecture: ArchitectureSpace | None, method: str) -> ChoiceSpace:
    """Return the architecture space as a program of choices.

    Args:
        architecture: the space.
        method: name of the method, for errors.

    Raises:
        ConfigError: the space is not a program of choices.
    """
    if isinstance(architecture, ChoiceSpace):
        return architecture
    own = architecture.space if isinstance(architecture, OwnSpace) else architecture
    given = "no architecture is searched" if own is None else f"{type(own).__name__} is none"
    raise ConfigError(
        f"search.architecture.space: the method {method} answers the choices of a program, and {given}. Take a "
        "built-in space of choices (chain, cell), derive your own from "
        "orchestray.search.spaces.architectures.choices.ChoiceSpace, or take regularized_evolution or random, which "
        "need only sample, mutate, crossover and build."
    )


class Questions:
    """The choices for a trial in a fixed order: the network, then the hyper-parameters."""

    def __init__(self, space: Mapping[str, Dimension], architecture: ArchitectureSpace | None, method: str) -> None:
        """
        Args:
            space: dimension of each dotted key; at most `LEVELS` values of a range are offered.
            architecture: the program of choices; may be None if there are hyper-parameters.
            method: name of the method, for errors.
        """
        self.architecture = None if architecture is None and space else choice_space(architecture, method)
        self._space, self._method = Space.of(space), method
        self._offered = {key: _offered(self._space[key]) for key in self._space.order}
        self._keys: dict[tuple[tuple[str, type, Any], ...], str] = {}
        """Keys of recent answers: a learner draws the same answers often, and a network's key is slow to compute."""

    def answer(self, pick: Pick, architecture: ChoiceSpace | None = None) -> list[Decision]:
        """Return the answers of `pick` to all choices of the architecture (default: the space's) and of the keys.

        A key that a point does not have is not asked for. Answers that no trial can have are asked for again.
        """
        asking = architecture or self.architecture
        decisions: list[Decision] = []
        for _ in range(MAX_DRAWS):
            decisions = [] if asking is None else asking.decide(pick)
            values: dict[str, Any] = {}
            for name, options in self._offered.items():
                if self._space.conditions.is_active(name, values):
                    decisions.append(Decision(name, options, pick(name, options)))
                    values[name] = decisions[-1].value
            if self._space.is_allowed(values):
                break
        return decisions

    def cautions(self) -> Sequence[str]:
        """Return a sentence on the ranges of which not all numbers are offered, if there are any."""
        cut = [key for key, offered in self._offered.items() if len(offered) != self._space[key].num_values]
        if not cut:
            return ()
        text = (
            f"{self._method} tries at most {LEVELS} numbers of a range, evenly over it, and so of {', '.join(cut)}; "
            "list those that it should try with type: choice, or take bayesian, which tries any"
        )
        return (text,)

    def genome(self, decisions: Sequence[Decision]) -> Any:
        """Return the network of some answers; None if no architecture is searched."""
        if self.architecture is None:
            return None
        return self.architecture.genome_of([one for one in decisions if one.name not in self._offered])

    def changes(self, decisions: Sequence[Decision]) -> dict[str, Any]:
        """Return the hyper-parameters of some answers."""
        return {one.name: one.value for one in decisions if one.name in self._offered}

    def key(self, decisions: Sequence[Decision]) -> str:
        """Return a key that is equal for answers that make the same trial."""
        answers = tuple(
            # The options of a hyper-parameter never change, and need not be scalars: the index identifies them.
            (one.name, int, one.index) if one.name in self._offered else (one.name, one.value.__class__, one.value)
            for one in decisions
        )
        key = self._keys.get(answers)
        if key is None:
            network = "" if self.architecture is None else key_of(self.architecture, self.genome(decisions))
            key = f"{network}{json.dumps(self.changes(decisions))}"
            if len(self._keys) == _NUM_KEYS:
                self._keys.clear()
            self._keys[answers] = key
        return key

    def proposal(self, trial: int, decisions: Sequence[Decision], change: str = "") -> Proposal:
        """Return the proposal of some answers."""
        return Proposal(trial, changes=self.changes(decisions), genome=self.genome(decisions), change=change)


def _offered(dimension: Dimension) -> tuple[Any, ...]:
    if isinstance(dimension, Choice):
        return tuple(dimension.all_values())
    number = min(dimension.num_values or LEVELS, LEVELS)
    return tuple(dict.fromkeys(dimension.from_unit((index + 0.5) / number) for index in range(number)))


class Evaluations:
    """The scores of answers by key, so that none is evaluated twice."""

    def __init__(self) -> None:
        self._scores: dict[str, float] = {}
        self._failed: set[str] = set()
        self._key_of: dict[int, str] = {}
        self._pending: set[str] = set()
        self._worst: float | None = None

    def __len__(self) -> int:
        return len(self._scores) + len(self._failed)

    def is_known(self, key: str) -> bool:
        """Return True if the answer has been evaluated, well or not."""
        return key in self._scores or key in self._failed

    def score(self, key: str) -> float | None:
        """Return the score of an answer, or None; a failed one has the worst score so far, if there is any.

        Any other number could be better than all scores to come.
        """
        return self._worst if key in self._failed else self._scores.get(key)

    def is_pending(self, key: str) -> bool:
        """Return True if the answer is being evaluated."""
        return key in self._pending

    def begin(self, key: str, trial: int) -> None:
        """Record that a trial evaluates the answer."""
        self._pending.add(key)
        self._key_of[trial] = key

    def end(self, finished: Finished) -> str:
        """Record the end of a trial and return its key; without a finite score it has failed."""
        key = self._key_of.pop(finished.trial)
        self._pending.discard(key)
        score = finished.score
        if finished.status == "failed" or score is None or not math.isfinite(score):
            self._failed.add(key)
            return key
        self._worst = score if self._worst is None else min(self._worst, score)
        self._scores[key] = score
        return key
