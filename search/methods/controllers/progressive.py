"""A search from simple to complex networks, guided by a predictor (Liu et al., "Progressive Neural Architecture
Search", ECCV 2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Method, Proposal, rng_of
from orchestray.search.methods.controllers.answering import Evaluations, Questions
from orchestray.search.methods.controllers.surrogate import Description, Surrogate, describe
from orchestray.search.spaces.architectures.choices import ChoiceSpace, Decision

_SAMPLE, _CHOOSE, _LENGTH, _FIT = range(4)
_NUM_MEASURED = 32

Candidates = dict[str, list[Decision]]
"""Maps a key to its answers."""


class Progressive(Method):
    """Levels of rising complexity.

    At each level the `beam` candidates with the best predictions are evaluated (random ones at the first level). The
    best of them are grown by one level in every way. At the last level the remaining trials evaluate further
    candidates, `beam` at a time.

    `grow_by` names the measure of complexity. An argument of the space, such as `nodes` of `cell`, rises from 1 to its
    value; the options of a choice should rise. A grown network keeps all answers of its parent.
    Without `grow_by` the program's choices are opened in `levels` stretches; those not yet open have their first
    option.

    A level is complete before the next begins: at most `beam` trials run at once, and proposals do not depend on the
    order in which trials end.
    """

    is_order_free = True

    def __init__(
        self,
        *,
        beam: int = 8,
        grow_by: str | None = None,
        levels: int = 3,
        candidates: int = 1000,
        **common: Any,
    ) -> None:
        """Take the parameters of `params.Progressive` and the arguments of `Method`.

        If `grow_by` names a number, it is the space's attribute of that name, which `compose` reads. The space must be
        able to build networks for lower numbers. Above `candidates` networks of a level, as many are drawn.

        Raises:
            ConfigError: the space is not a program of choices, or has no choice named `grow_by`.
        """
        super().__init__(**common)
        self._questions = Questions(self.space, self.architecture, "progressive")
        self._beam, self._candidates = beam, candidates
        self._grower = _Grower(self._questions, grow_by, levels, self.seed)
        self._evaluations = Evaluations()
        self._libraries = ThreadpoolController()
        self._decisions: dict[str, list[Decision]] = {}
        """Answers of all evaluated networks, by key."""
        self._described: dict[str, Description] = {}
        """Descriptions of the evaluated networks and of the candidates of this level, by key."""
        self.level = 0
        self._open: Candidates = self._candidates_of(None)
        self._at_level: dict[str, None] = {}
        """Keys evaluated at this level."""
        self._queue: list[str] = self._chosen()
        self._proposed = self._running = 0

    def cautions(self) -> Sequence[str]:
        return self._questions.cautions()

    @property
    def is_done(self) -> bool:
        is_spent = self.trials is not None and self._proposed >= self.trials
        return is_spent or (not self._queue and not self._running)

    def ask(self) -> Proposal | None:
        if self.is_done or not self._queue:
            return None
        key = self._queue.pop(0)
        trial = self._proposed
        self._proposed += 1
        self._running += 1
        self._evaluations.begin(key, trial)
        return self._questions.proposal(trial, self._decisions[key], f"level {self.level + 1}")

    def tell(self, finished: Finished) -> None:
        self._evaluations.end(finished)
        self._running -= 1
        while not self._running and not self._queue and self._advance():
            self._queue = self._chosen()

    def _advance(self) -> bool:
        """Move to the next level, or stay at the last; return True if there is more to evaluate."""
        if self.level + 1 < self._grower.num_levels:
            ranked = sorted(self._at_level, key=self._score, reverse=True)
            parents = [self._decisions[key] for key in ranked[: self._beam]]
            self.level += 1
            self._at_level = {}
            self._open = self._candidates_of(parents)
            return True
        return self.trials is not None and any(self._is_new(key) for key in self._open)

    def _candidates_of(self, parents: Sequence[Sequence[Decision]] | None) -> Candidates:
        """Return the candidates that the parents can be grown to, equally many of each."""
        found: Candidates = {}
        limit = self._candidates if parents is None else max(1, self._candidates // max(1, len(parents)))
        for index, parent in enumerate([None] if parents is None else parents):
            rng = rng_of(self.seed, _SAMPLE, self.level, index)
            for decisions in self._grower.grown(self.level, parent, limit, rng):
                found.setdefault(self._questions.key(decisions), decisions)
        kept = {key: self._described[key] for key in self._decisions}
        self._described = {**{key: describe(decisions) for key, decisions in found.items()}, **kept}
        return found

    def _chosen(self) -> list[str]:
        """Return the keys to evaluate next at this level; known candidates may be grown, too."""
        keys = list(self._open)
        liking = self._liking(keys)
        order = sorted(range(len(keys)), key=lambda index: -liking[index])
        chosen = [keys[index] for index in order if self._is_new(keys[index])][: self._beam]
        known = [key for key in keys if not self._is_new(key)]
        self._at_level.update(dict.fromkeys([*known, *chosen]))
        self._decisions.update({key: self._open[key] for key in chosen})
        return chosen

    def _liking(self, keys: Sequence[str]) -> Sequence[float]:
        tried = [key for key in self._decisions if self._evaluations.score(key) is not None]
        if len(tried) < 2:
            return list(rng_of(self.seed, _CHOOSE).random(len(keys)))
        surrogate = Surrogate(seed=int(rng_of(self.seed, _FIT, len(self._evaluations)).integers(2**31)))
        # On one thread, since sums depend on the number of threads.
        with self._libraries.limit(limits=1, user_api="blas"):
            surrogate.fit([self._described[key] for key in tried], [self._score(key) for key in tried])
            return [float(value) for value in surrogate.predict([self._described[key] for key in keys])]

    def _is_new(self, key: str) -> bool:
        return not self._evaluations.is_known(key)

    def _score(self, key: str) -> float:
        score = self._evaluations.score(key)
        return float("-inf") if score is None else score


class _Grower:
    """The answers that are open at each level, and all ways to give them."""

    def __init__(self, questions: Questions, grow_by: str | None, levels: int, seed: int) -> None:
        self._questions, self._grow_by = questions, grow_by
        self._smaller = _smaller(questions.architecture, grow_by)
        if self._smaller:
            self.num_levels = len(self._smaller)
            return
        measured = [_drawn(questions, rng_of(seed, _LENGTH, index)) for index in range(_NUM_MEASURED)]
        if grow_by is None:
            longest = max(len(decisions) for decisions in measured)
            self._stretch = max(1, -(-longest // levels))
            self.num_levels = -(-longest // self._stretch)
            return
        found = [one for decisions in measured for one in decisions if one.name == grow_by]
        if not found:
            names = sorted({one.name for decisions in measured for one in decisions})
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise ConfigError(
                f"search.method.grow_by: the space has no number and makes no choice named {grow_by!r}; it makes "
                f"{shown}. Name what rises in complexity (nodes, of the space cell), or leave it out."
            )
        self.num_levels = len(found[0].options)

    def grown(
        self, level: int, parent: Sequence[Decision] | None, limit: int, rng: np.random.Generator
    ) -> list[list[Decision]]:
        """Return what a parent of the previous level can be grown to: everything, or `limit` draws if there is more."""
        every = list(islice(self._all(level, parent), limit + 1))
        if len(every) <= limit:
            return every
        return [self._answer(level, parent, lambda size: int(rng.integers(size))) for _ in range(limit)]

    def _all(self, level: int, parent: Sequence[Decision] | None) -> Iterator[list[Decision]]:
        path: list[int] | None = []
        while path is not None:
            taken: list[tuple[int, int]] = []

            def choose(size: int, path: list[int] = path, taken: list[tuple[int, int]] = taken) -> int:
                taken.append((path[len(taken)] if len(taken) < len(path) else 0, size))
                return taken[-1][0]

            yield self._answer(level, parent, choose)
            path = _next(taken)

    def _answer(self, level: int, parent: Sequence[Decision] | None, choose: Any) -> list[Decision]:
        kept = {one.name: one.value for one in parent or ()}
        asked = 0

        def pick(name: str, options: Sequence[Any]) -> int:
            nonlocal asked
            place, asked = asked, asked + 1
            listed = list(options)
            if name == self._grow_by:
                return min(level, len(listed) - 1)
            if self._is_kept(level, place, parent is not None) and name in kept and kept[name] in listed:
                return listed.index(kept[name])
            return int(choose(len(listed))) if self._is_open(level, place) else 0

        return self._questions.answer(pick, self._smaller[level] if self._smaller else None)

    def _is_kept(self, level: int, place: int, has_parent: bool) -> bool:
        return has_parent and (self._grow_by is not None or place < self._stretch * level)

    def _is_open(self, level: int, place: int) -> bool:
        return self._grow_by is not None or place < self._stretch * (level + 1)


def _smaller(architecture: ChoiceSpace | None, grow_by: str | None) -> list[ChoiceSpace]:
    """Return the space for each value of the named argument from 1 up; empty if it has no such number."""
    if architecture is None or grow_by is None:
        return []
    whole = vars(architecture).get(grow_by)
    if not isinstance(whole, int) or isinstance(whole, bool):
        return []
    spaces = [copy(architecture) for _ in range(whole)]
    for number, space in enumerate(spaces, start=1):
        vars(space)[grow_by] = number
    return spaces


def _next(taken: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return the open answers after these, the last varying fastest; None after the last of all."""
    for place in reversed(range(len(taken))):
        index, size = taken[place]
        if index + 1 < size:
            return [*(before for before, _ in taken[:place]), index + 1]
    return None


def _drawn(questions: Questions, rng: np.random.Generator) -> list[Decision]:
    return questions.answer(lambda _name, options: int(rng.integers(len(options))))
