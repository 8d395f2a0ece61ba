"""Q-learning of networks: layer by layer (Baker et al., "Designing Neural Network Architectures using
Reinforcement Learning", ICLR 2017: MetaQNN) or by the codes of a block that is then stacked (Zhong et al., "Practical
Block-wise Neural Network Architecture Generation", CVPR 2018: BlockQNN). The space decides which of the two it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestray.search.methods.base import Finished, Method, Proposal, rng_of
from orchestray.search.methods.controllers.answering import Evaluations, Questions

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.choices import Decision

State = tuple[Any, ...]
_EPSILONS = tuple(round(0.1 * tenth, 1) for tenth in range(9, 0, -1))
_DRAW, _REPLAY = 0, 1


class QTable:
    """The value of each option in each state.

    A state is the name of a choice, its options, and the answers just before it.
    """

    def __init__(self, *, memory: int | None = None, learning_rate: float = 0.1, discount: float = 1.0) -> None:
        """
        Args:
            memory: number of previous answers that make up the state of a choice; None: all of them.
            learning_rate: part of the way that a value moves to its target.
            discount: discount of the value of the next choice.
        """
        self._memory, self._learning_rate, self._discount = memory, learning_rate, discount
        self.values: dict[State, list[float]] = {}
        """Values of the options of each state, as lists: for few options numpy is five times slower."""
        self._mean = 0.0
        self._seen = 0

    def state(self, name: str, options: Sequence[Any], before: Sequence[Any]) -> State:
        """Return the state of a choice after some answers."""
        kept = before if self._memory is None else before[max(len(before) - self._memory, 0) :]
        return (name, tuple(map(_hashable, options)), tuple(map(_hashable, kept)))

    def of(self, state: State) -> list[float]:
        """Return the values of a state's options; those of a new state are the mean of all scores."""
        values = self.values.get(state)
        if values is None:
            values = self.values[state] = [self._mean] * len(state[1])
        return values

    def see(self, score: float) -> None:
        """Add a score to the mean that new states start with."""
        self._seen += 1
        self._mean += (score - self._mean) / self._seen

    def path(self, decisions: Sequence[Decision]) -> list[tuple[State, int]]:
        """Return the states that the answers passed through, with the index of the option taken in each."""
        before: list[Any] = []
        steps = []
        for one in decisions:
            steps.append((self.state(one.name, one.options, before), one.index))
            before.append(one.value)
        return steps

    def update(self, path: Sequence[tuple[State, int]], score: float, *, shaped: bool = False) -> None:
        """Move the values along a path, the last first (Baker et al., section 4.2; equation 3).

        Args:
            path: result of `path`.
            score: the reward at its end.
            shaped: give every choice an equal part of the reward (Zhong et al., section 3.3, equation 5) instead of the
                whole to the last.
        """
        self.follow([(self.of(state), index) for state, index in reversed(path)][::-1], score, shaped=shaped)

    def follow(self, path: Sequence[tuple[list[float], int]], score: float, *, shaped: bool = False) -> None:
        """Update the values along a path whose values have been looked up already, for repeated use."""
        part = score / len(path) if shaped else 0.0
        ahead = 0.0 if shaped else score
        rate, discount = self._learning_rate, self._discount
        for values, index in reversed(path):
            values[index] += rate * (part + ahead - values[index])
            ahead = discount * max(values)


class QLearning(Method):
    """Epsilon-greedy Q-learning with replay; epsilon falls from 1 to 0.1.

    A network that is drawn again has its known score at once; a failed one has the worst score so far, and teaches
    nothing before there is one. After `repeats`
    known networks in a row answers are drawn evenly. After as many more the search ends: there is nothing new to find.
    Proposals depend on the order in which trials end.
    """

    def __init__(
        self,
        *,
        memory: int | None = 2,
        learning_rate: float = 0.1,
        discount: float = 1.0,
        exploration: float = 0.55,
        replay: int = 32,
        shaped: bool = False,
        repeats: int = 50,
        **common: Any,
    ) -> None:
        """Take the parameters of `params.QLearning` and the arguments of `Method`.

        Epsilon falls in equal stretches (MetaQNN explores for 1,500 of 2,700 trials). Without `trials`, the stretches
        are those of 100 trials. If more trials are allowed later, the stretches are parts of the new total.
        """
        super().__init__(**common)
        self._questions = Questions(self.space, self.architecture, "q_learning")
        self.table = QTable(memory=memory, learning_rate=learning_rate, discount=discount)
        self._exploration, self._replay, self._shaped, self._repeats = exploration, replay, shaped, repeats
        self._evaluations = Evaluations()
        self._decisions: dict[int, list[Decision]] = {}
        self._untaught: list[tuple[str, list[Decision]]] = []
        """Keys and answers of trials that have failed before any had a score."""
        self._memory: list[tuple[list[tuple[list[float], int]], float]] = []
        """Values on the path of each evaluated network, and its score."""
        self._proposed = self._drawn = self._num_ended = 0
        self._is_exhausted = False

    def cautions(self) -> Sequence[str]:
        return self._questions.cautions()

    @property
    def is_done(self) -> bool:
        return self._is_exhausted or (self.trials is not None and self._proposed >= self.trials)

    def epsilon(self, trial: int) -> float:
        """Return the part of a trial's answers that is drawn evenly."""
        total = self.trials or 100
        explored = round(self._exploration * total)
        if trial < explored:
            return 1.0
        stretch = max(1.0, (total - explored) / len(_EPSILONS))
        return _EPSILONS[min(int((trial - explored) / stretch), len(_EPSILONS) - 1)]

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        for attempt in range(2 * self._repeats):
            epsilon = self.epsilon(self._proposed) if attempt < self._repeats else 1.0
            decisions = self._draw(epsilon)
            key = self._questions.key(decisions)
            if self._evaluations.is_pending(key):
                continue
            if not self._evaluations.is_known(key):
                return self._propose(decisions, key, epsilon)
            if (score := self._evaluations.score(key)) is not None:
                self.table.update(self.table.path(decisions), score, shaped=self._shaped)
        self._is_exhausted = not self._decisions  # a running trial may make others worth trying
        return None

    def tell(self, finished: Finished) -> None:
        self._untaught.append((self._evaluations.end(finished), self._decisions.pop(finished.trial)))
        for key, decisions in self._untaught:
            if (score := self._evaluations.score(key)) is None:
                return  # so have all of them
            self._teach(decisions, score)
        self._untaught = []

    def _teach(self, decisions: Sequence[Decision], score: float) -> None:
        self.table.see(score)
        path = self.table.path(decisions)
        self.table.update(path, score, shaped=self._shaped)
        self._memory.append(([(self.table.of(state), index) for state, index in path], score))
        rng = rng_of(self.seed, _REPLAY, self._num_ended)
        self._num_ended += 1
        for index in rng.integers(len(self._memory), size=self._replay).tolist():
            self.table.follow(*self._memory[index], shaped=self._shaped)

    def _draw(self, epsilon: float) -> list[Decision]:
        rng = rng_of(self.seed, _DRAW, self._drawn)
        self._drawn += 1
        before: list[Any] = []

        def pick(name: str, options: Sequence[Any]) -> int:
            values = self.table.of(self.table.state(name, options, before))
            if rng.random() < epsilon:
                index = int(rng.integers(len(options)))
            else:
                index = int(rng.choice(np.flatnonzero(np.equal(values, max(values)))))
            before.append(options[index])
            return index

        return self._questions.answer(pick)

    def _propose(self, decisions: list[Decision], key: str, epsilon: float) -> Proposal:
        trial = self._proposed
        self._proposed += 1
        self._decisions[trial] = decisions
        self._evaluations.begin(key, trial)
        return self._questions.proposal(trial, decisions, f"drawn with epsilon {epsilon}")


def _hashable(value: Any) -> Any:
    """Return a value, or the JSON of a list or a section, which cannot be a key of a table itself."""
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value
