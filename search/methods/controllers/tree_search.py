"""Monte Carlo tree search of a program of choices (Negrinho and Gordon, "DeepArchitect: Automatically Designing and
Training Deep Architectures", 2017, section 5): the tree of the answers, descended by upper confidence bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestray.search.methods.base import Finished, Method, Proposal, rng_of
from orchestray.search.methods.controllers.answering import Evaluations, Questions

if TYPE_CHECKING:
    import numpy as np

    from orchestray.search.spaces.architectures.choices import Decision


@dataclass
class Node:
    """A place in the tree: all networks whose first answers are the same."""

    visits: int = 0
    """Number of draws that went through, those without a score yet included."""
    num_scores: int = 0
    total: float = 0.0
    """Sum of the scores of the networks below."""
    num_moves: int = 0
    """Number of ways on; 0: not known yet, or none."""
    moves: dict[int, Node] = field(default_factory=dict)
    """Nodes that draws have come to, by way."""
    is_closed: bool = False
    """True if all networks below have been drawn."""

    def close_if_drawn(self) -> None:
        """Close the node if all its ways are closed; one without any is a network that has been drawn."""
        self.is_closed = len(self.moves) == self.num_moves and all(node.is_closed for node in self.moves.values())


class _AllDrawnError(Exception):
    """Nothing is left to draw."""


class TreeSearch(Method):
    """A tree search in which each draw goes from the first choice to the last, and its score to all nodes on the way.

    Where not every option of a choice has been drawn, one of the others is drawn evenly. Elsewhere the option with the
    highest upper confidence bound is taken: its mean score plus `exploration` * sqrt(2 ln n / m). The choice has had n
    draws and the option m; scores are scaled, the worst so far to 0 and the best to 1. Draws that are still evaluated
    count, so that trials that run at once go different ways.

    No network is drawn twice, and the search ends when all have been. Proposals depend on the order in which trials
    end.
    """

    def __init__(self, *, exploration: float = 0.3, bisection: bool = False, **common: Any) -> None:
        """Take the parameters of `params.TreeSearch` and the arguments of `Method`.

        Raises:
            ConfigError: the space is not a program of choices.
        """
        super().__init__(**common)
        self._questions = Questions(self.space, self.architecture, "tree_search")
        self._exploration, self._bisection = exploration, bisection
        self.root = Node()
        self._evaluations = Evaluations()
        self._paths: dict[int, list[Node]] = {}
        """Nodes that each running trial was drawn through, the root first."""
        self._scoreless: list[tuple[str, list[Node]]] = []
        """Keys and ways of draws of networks that have failed before any had a score."""
        self._proposed = self._drawn = 0
        self._least, self._most = math.inf, -math.inf

    def cautions(self) -> Sequence[str]:
        return self._questions.cautions()

    @property
    def is_done(self) -> bool:
        return self.root.is_closed or (self.trials is not None and self._proposed >= self.trials)

    def ask(self) -> Proposal | None:
        while not self.is_done:
            try:
                decisions, path = self._draw()
            except _AllDrawnError:
                return None
            key = self._questions.key(decisions)
            if self._evaluations.is_pending(key):
                continue  # other answers, the same network
            if not self._evaluations.is_known(key):
                return self._propose(decisions, key, path)
            self._score(key, path)
        return None

    def tell(self, finished: Finished) -> None:
        key = self._evaluations.end(finished)
        self._score(key, self._paths.pop(finished.trial))

    def _propose(self, decisions: list[Decision], key: str, path: list[Node]) -> Proposal:
        trial = self._proposed
        self._proposed += 1
        self._paths[trial] = path
        self._evaluations.begin(key, trial)
        return self._questions.proposal(trial, decisions, "descended the tree")

    def _score(self, key: str, path: list[Node]) -> None:
        """Add the score of a network to all nodes on the way to it, or once there is any, if it has failed."""
        self._scoreless.append((key, path))
        for failed_or_new, way in self._scoreless:
            score = self._evaluations.score(failed_or_new)
            if score is None:
                return  # so have all of them
            self._least, self._most = min(self._least, score), max(self._most, score)
            for node in way:
                node.num_scores += 1
                node.total += score
        self._scoreless = []

    # -- a draw --------------------------------------------------------------------------------------------------------

    def _draw(self) -> tuple[list[Decision], list[Node]]:
        """Return the answers of one descent, and the nodes on its way.

        Raises:
            _AllDrawnError: the answers that were left cannot be had together.
        """
        rng = rng_of(self.seed, self._drawn)
        self._drawn += 1
        path = [self.root]
        answered: set[str] = set()

        def pick(name: str, options: Sequence[Any]) -> int:
            if name in answered:  # the answers before cannot be had together; the questions are asked again
                _count(path)
                if self.root.is_closed:
                    raise _AllDrawnError
                path[:] = [self.root]
                answered.clear()
            answered.add(name)
            return self._descend(path, len(options), rng)

        decisions = self._questions.answer(pick)
        _count(path)
        return decisions, path

    def _descend(self, path: list[Node], num_options: int, rng: np.random.Generator) -> int:
        """Return the index of an option, and add the nodes that lead to it to the path."""
        first, last = 0, num_options
        while last - first > 1:
            size = -(-(last - first) // 2) if self._bisection else 1
            starts = range(first, last, size)
            node = path[-1]
            node.num_moves = len(starts)
            way = self._way(node, rng)
            path.append(node.moves.setdefault(way, Node()))
            first, last = starts[way], min(starts[way] + size, last)
        return first

    def _way(self, node: Node, rng: np.random.Generator) -> int:
        new = [way for way in range(node.num_moves) if way not in node.moves]
        if new:
            return new[int(rng.integers(len(new)))]
        ways = [way for way in range(node.num_moves) if not node.moves[way].is_closed]
        bounds = [self._bound(node, node.moves[way]) for way in ways]
        best = max(bounds)
        chosen = [way for way, bound in zip(ways, bounds, strict=True) if bound == best]
        return chosen[int(rng.integers(len(chosen)))]

    def _bound(self, node: Node, child: Node) -> float:
        known = child if child.num_scores else node
        mean = known.total / known.num_scores if known.num_scores else 0.0
        spread = self._most - self._least
        scaled = (mean - self._least) / spread if spread > 0.0 else 0.0
        return scaled + self._exploration * math.sqrt(2.0 * math.log(max(node.visits, 1)) / max(child.visits, 1))


def _count(path: Sequence[Node]) -> None:
    """Count a draw at each node of its way, and close those below which nothing is left to draw."""
    for node in reversed(path):
        node.visits += 1
        node.close_if_drawn()
