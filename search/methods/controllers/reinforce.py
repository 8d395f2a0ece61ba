"""Controllers that learn by reward which network to build (Zoph and Le, "Neural Architecture Search with
Reinforcement Learning", ICLR 2017).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestray.search.methods.base import Finished, Method, Proposal, rng_of
from orchestray.search.methods.controllers.answering import Evaluations, Questions
from orchestray.search.methods.controllers.policy import Policy, Vocabulary, policy_gradient
from orchestray.search.methods.controllers.server import ParameterServer

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.choices import Decision


@dataclass(frozen=True)
class _Child:
    decisions: list[Decision]
    key: str


@dataclass
class Controller:
    """A replica: a copy of the parameters, and the children drawn with them."""

    index: int
    policy: Policy
    version: int = 0
    """Version of the parameters."""
    batch: list[_Child] = field(default_factory=list)
    drawn: int = 0
    """Number of children in all batches."""


class Reinforce(Method):
    """Policy-gradient search with one or more controllers.

    Each controller draws `children` networks with its parameters. When all are evaluated it sends the policy gradient
    to the parameter server, fetches the newest parameters, and draws again.

    A network that is drawn again has its known score at once; a failed one has the worst score so far. One controller
    waits for its whole batch, so its proposals do not depend on the order in which trials end (`is_order_free`).
    Several controllers receive each other's updates, so their proposals do. The search ends early when `repeats` known
    networks were drawn in a row: the policy has settled.
    """

    def __init__(
        self,
        *,
        children: int = 8,
        controllers: int = 1,
        shards: int = 1,
        hidden: int = 35,
        learning_rate: float = 0.01,
        baseline_decay: float = 0.8,
        entropy_weight: float = 0.0,
        repeats: int = 200,
        **common: Any,
    ) -> None:
        """Take the parameters of `params.Reinforce` and the arguments of `Method`."""
        super().__init__(**common)
        self._questions = Questions(self.space, self.architecture, "reinforce")
        self._children, self._repeats = children, repeats
        self._baseline_decay, self._entropy_weight = baseline_decay, entropy_weight
        vocabulary = Vocabulary()
        first = Policy(vocabulary, hidden=hidden, seed=self.seed)
        self.server = ParameterServer(first.parameters, shards=shards, learning_rate=learning_rate)
        self.controllers = [first, *(Policy(vocabulary, hidden=hidden, seed=self.seed) for _ in range(controllers - 1))]
        self._replicas = [Controller(index, policy) for index, policy in enumerate(self.controllers)]
        self.baseline: float | None = None
        """Moving average of the scores; None before the first update."""
        self.staleness: list[int] = []
        """Staleness of each update: number of updates by others since its controller's parameters."""
        self.is_order_free = controllers == 1  # type: ignore[misc]  # several receive each other's updates
        self._evaluations = Evaluations()
        self._proposed = self._known_in_row = 0
        self._turn = 0

    @property
    def is_done(self) -> bool:
        return self._known_in_row >= self._repeats or (self.trials is not None and self._proposed >= self.trials)

    def ask(self) -> Proposal | None:
        while not self.is_done and (replica := self._next_replica()) is not None:
            child = self._draw(replica)
            is_pending = self._evaluations.is_pending(child.key)
            if self._evaluations.known(child.key) is None and not is_pending:
                self._known_in_row = 0
                return self._propose(child, replica)
            self._known_in_row += 1
            if not is_pending:
                self._update_if_complete(replica)
        return None

    def tell(self, finished: Finished) -> None:
        self._evaluations.end(finished)
        for replica in self._replicas:
            self._update_if_complete(replica)

    def _next_replica(self) -> Controller | None:
        """Return the next controller, by turns, that has not drawn its whole batch; None if all have."""
        for offset in range(len(self._replicas)):
            index = (self._turn + offset) % len(self._replicas)
            if len(self._replicas[index].batch) < self._children:
                self._turn = index + 1
                return self._replicas[index]
        return None

    def _draw(self, replica: Controller) -> _Child:
        rng = rng_of(self.seed, 1, replica.index, replica.drawn)
        decisions = replica.policy.draw(self._questions, rng)
        child = _Child(decisions, self._questions.key(decisions))
        replica.drawn += 1
        replica.batch.append(child)
        return child

    def _propose(self, child: _Child, replica: Controller) -> Proposal:
        trial = self._proposed
        self._proposed += 1
        self._evaluations.begin(child.key, trial)
        drawn_by = f"drawn by controller {replica.index} at version {replica.version}"
        return self._questions.proposal(trial, child.decisions, drawn_by)

    def _update_if_complete(self, replica: Controller) -> None:
        known = [self._evaluations.known(child.key) for child in replica.batch]
        scores = [score for score in known if score is not None]
        if len(scores) < self._children:
            return
        mean = sum(scores) / len(scores)
        baseline = mean if self.baseline is None else self.baseline
        gradients = policy_gradient(
            replica.policy,
            [child.decisions for child in replica.batch],
            [score - baseline for score in scores],
            entropy_weight=self._entropy_weight,
        )
        self.staleness.append(self.server.push(gradients, replica.policy.parameters, replica.version))
        self.baseline = self._baseline_decay * baseline + (1 - self._baseline_decay) * mean
        replica.version, replica.policy.parameters = self.server.fetch()
        replica.batch = []
