"""A search as a sequence of choices that a method answers one by one, and what is known of the answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Proposal
from orchestray.search.spaces.base import key_of
from orchestray.search.spaces.choices import ChoiceSpace, Decision
from orchestray.search.spaces.registry import OwnSpace

if TYPE_CHECKING:
    from orchestray.search.spaces.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension

LEVELS = 8
"""Values that are offered of a dimension with more of them than that, evenly over its range."""

_NUM_KEYS = 4096

Pick = Callable[[str, Sequence[Any]], int]


def choice_space(architecture: ArchitectureSpace | None, method: str) -> ChoiceSpace:
    """The space of a method that answers choices.

    Raises:
        ConfigError: it is no program of choices.
    """
    if isinstance(architecture, ChoiceSpace):
        return architecture
    own = architecture.space if isinstance(architecture, OwnSpace) else architecture
    given = "no architecture is searched" if own is None else f"{type(own).__name__} is none"
    raise ConfigError(
        f"search.architecture.space: the method {method} answers the choices of a program, and {given}. Take a "
        "built-in space of choices (chain, cell), derive your own from orchestray.search.spaces.choices.ChoiceSpace, "
        "or take regularized_evolution or random, which need only sample, mutate, crossover and build."
    )


class Questions:
    """All that is chosen for a trial, in one order: the network, then the hyper-parameters."""

    def __init__(self, space: Mapping[str, Dimension], architecture: ArchitectureSpace | None, method: str) -> None:
        """
        Args:
            space: of each dotted key; of more than `LEVELS` values so many are offered.
            architecture: the program of choices; may be None where there are hyper-parameters.
            method: named in errors.
        """
        self.architecture = None if architecture is None and space else choice_space(architecture, method)
        self._offered = {key: _offered(dimension) for key, dimension in space.items()}
        self._keys: dict[tuple[tuple[str, type, Any], ...], str] = {}
        """Of the last answers: what learns draws the same again and again, and a network's key takes long."""

    def answer(self, pick: Pick, architecture: ChoiceSpace | None = None) -> list[Decision]:
        """Have every choice answered by `pick`: those of the architecture, or of a part of it in its place."""
        asking = architecture or self.architecture
        decisions = [] if asking is None else asking.decide(pick)
        for name, options in self._offered.items():
            decisions.append(Decision(name, options, pick(name, options)))
        return decisions

    def genome(self, decisions: Sequence[Decision]) -> Any:
        """The network of some answers; None if no architecture is searched."""
        if self.architecture is None:
            return None
        return self.architecture.genome_of([one for one in decisions if one.name not in self._offered])

    def changes(self, decisions: Sequence[Decision]) -> dict[str, Any]:
        """The hyper-parameters of some answers."""
        return {one.name: one.value for one in decisions if one.name in self._offered}

    def key(self, decisions: Sequence[Decision]) -> str:
        """The same for answers that make the same trial."""
        answers = tuple(
            # What a hyper-parameter may be is the same each time, and need be no scalar.
            (one.name, int, one.index) if one.name in self._offered else (one.name, one.value.__class__, one.value)
            for one in decisions
        )
        key = self._keys.get(answers)
        if key is None:
            network = "" if self.architecture is None else key_of(self.architecture, self.genome(decisions))
            key = f"{network}{json.dumps(self.changes(decisions), sort_keys=True)}"
            if len(self._keys) == _NUM_KEYS:
                self._keys.clear()
            self._keys[answers] = key
        return key

    def proposal(self, trial: int, decisions: Sequence[Decision], change: str = "") -> Proposal:
        """The trial of some answers."""
        return Proposal(trial, changes=self.changes(decisions), genome=self.genome(decisions), change=change)


def _offered(dimension: Dimension) -> tuple[Any, ...]:
    count = dimension.num_values
    number = LEVELS if count is None else min(count, LEVELS) if dimension.is_ordered else count
    values = [dimension.from_unit((index + 0.5) / number) for index in range(number)]
    return tuple(dict.fromkeys(values))


class Evaluations:
    """What is known of each answer by its key, so that none is tried twice."""

    def __init__(self) -> None:
        self._scores: dict[str, float] = {}
        self._failed: set[str] = set()
        self._key_of: dict[int, str] = {}
        self._pending: set[str] = set()
        self._worst: float | None = None

    def __len__(self) -> int:
        return len(self._scores) + len(self._failed)

    def known(self, key: str) -> float | None:
        """The score of an answer that has been tried: of one that failed the worst there is so far (0 before any)."""
        if key in self._failed:
            return 0.0 if self._worst is None else self._worst
        return self._scores.get(key)

    def is_pending(self, key: str) -> bool:
        """Whether it is being tried."""
        return key in self._pending

    def begin(self, key: str, trial: int) -> None:
        """It is tried from now on."""
        self._pending.add(key)
        self._key_of[trial] = key

    def end(self, finished: Finished) -> str:
        """It has been tried; returns its key. One without a score that is a number has failed, too."""
        key = self._key_of.pop(finished.trial)
        self._pending.discard(key)
        score = finished.score
        if finished.status == "failed" or score is None or not math.isfinite(score):
            self._failed.add(key)
            return key
        self._worst = score if self._worst is None else min(self._worst, score)
        self._scores[key] = score
        return key
