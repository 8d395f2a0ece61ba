"""Controllers that learn by reward which network to build (Zoph and Le, "Neural Architecture Search with
Reinforcement Learning", ICLR 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestray.search.methods.base import Finished, Method, Proposal, rng_of
from orchestray.search.methods.controllers.answering import Evaluations, Questions
from orchestray.search.methods.controllers.policy import Policy, Vocabulary, policy_gradient
from orchestray.search.methods.controllers.server import ParameterServer

if TYPE_CHECKING:
    from torch import Tensor

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
    versions: Sequence[int]
    """Version of each shard in the parameters."""
    learned: Mapping[str, Tensor]
    """Learned values that it has fetched, by parameter."""
    updates: int = 0
    """Number of batches that it has pushed."""
    batch: list[_Child] = field(default_factory=list)
    drawn: int = 0
    """Number of children in all batches."""


Learn = Callable[
    [Controller, Sequence[Sequence["Decision"]], Sequence[float]],
    tuple[Sequence[int], Sequence[int], "Mapping[str, Tensor]"],
]
"""Pushes the gradient of a controller's batch, from its answers and their advantages.

Returns of each shard the staleness and the version fetched after it, and what was learned by parameter.
"""


class Reinforce(Method):
    """Policy-gradient search with one or more controllers.

    Each controller draws `children` networks with its parameters. When all are evaluated it sends the policy gradient
    to the parameter server, fetches the newest parameters, and draws again. A search on Ray has several controllers,
    and the shards of their parameters, in processes of their own (`work_with`), with the same result.

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
        self.server = ParameterServer(
            first.parameters, shards=shards, learning_rate=learning_rate, controllers=controllers
        )
        self.controllers = [first, *(Policy(vocabulary, hidden=hidden, seed=self.seed) for _ in range(controllers - 1))]
        self.replicas = [
            Controller(index, policy, self.server.versions, self.server.fetch())
            for index, policy in enumerate(self.controllers)
        ]
        self.of_controllers = (hidden, self.seed, entropy_weight, controllers)
        """Arguments of a `hosts.ControllerHost`."""
        self._learn: Learn = self._learn_here
        self.baseline: float | None = None
        """Moving average of the scores; None before the first update."""
        self.staleness: list[int] = []
        """Staleness of each update, at the shard where it is largest: updates by others since its parameters."""
        self.is_order_free = controllers == 1  # type: ignore[misc]  # several receive each other's updates
        self._evaluations = Evaluations()
        self._proposed = self._known_in_row = 0
        self._turn = 0

    def cautions(self) -> Sequence[str]:
        return self._questions.cautions()

    @property
    def is_done(self) -> bool:
        return self._known_in_row >= self._repeats or (self.trials is not None and self._proposed >= self.trials)

    @property
    def is_distributed(self) -> bool:
        """True if a search has its controllers and servers in processes of their own."""
        return len(self.replicas) > 1 or self.server.layout.num_shards > 1

    def work_with(self, learn: Learn | None) -> None:
        """Push to servers elsewhere from now on, which have begun with the state of `server`; None: to `server`."""
        self._learn = self._learn_here if learn is None else learn

    def ask(self) -> Proposal | None:
        while not self.is_done and (replica := self._next_replica()) is not None:
            child = self._draw(replica)
            is_pending = self._evaluations.is_pending(child.key)
            if not self._evaluations.is_known(child.key) and not is_pending:
                self._known_in_row = 0
                return self._propose(child, replica)
            self._known_in_row += 1
            if not is_pending:
                self._update_if_complete(replica)
        return None

    def tell(self, finished: Finished) -> None:
        self._evaluations.end(finished)
        for replica in self.replicas:
            self._update_if_complete(replica)

    def _next_replica(self) -> Controller | None:
        """Return the next controller, by turns, that has not drawn its whole batch; None if all have."""
        for offset in range(len(self.replicas)):
            index = (self._turn + offset) % len(self.replicas)
            if len(self.replicas[index].batch) < self._children:
                self._turn = index + 1
                return self.replicas[index]
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
        drawn_by = f"drawn by controller {replica.index} at version {replica.versions[0]}"
        return self._questions.proposal(trial, child.decisions, drawn_by)

    def _update_if_complete(self, replica: Controller) -> None:
        if sum(self._evaluations.is_known(child.key) for child in replica.batch) < self._children:
            return
        known = [self._evaluations.score(child.key) for child in replica.batch]
        scores = [score for score in known if score is not None]
        if not scores:  # all have failed, before any had a score: that teaches nothing
            replica.batch = []
            return
        mean = sum(scores) / len(scores)
        baseline = mean if self.baseline is None else self.baseline
        sequences = [child.decisions for child in replica.batch]
        staleness, replica.versions, replica.learned = self._learn(
            replica, sequences, [score - baseline for score in scores]
        )
        self.staleness.append(max(staleness))
        self.baseline = self._baseline_decay * baseline + (1 - self._baseline_decay) * mean
        replica.updates += 1
        replica.policy.adopt(replica.learned)
        replica.batch = []

    def _learn_here(
        self, replica: Controller, sequences: Sequence[Sequence[Decision]], advantages: Sequence[float]
    ) -> tuple[Sequence[int], Sequence[int], Mapping[str, Tensor]]:
        gradients = policy_gradient(replica.policy, sequences, advantages, entropy_weight=self._entropy_weight)
        staleness = self.server.push(gradients, replica.versions, controller=replica.index, number=replica.updates + 1)
        return staleness, self.server.versions, self.server.fetch()
