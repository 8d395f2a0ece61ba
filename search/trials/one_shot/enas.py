"""Alternating training of shared weights and a controller: ENAS.

Pham et al., "Efficient Neural Architecture Search via Parameter Sharing", ICML 2018, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from orchestray.search.methods.base import rng_of
from orchestray.search.methods.controllers.answering import Questions
from orchestray.search.methods.controllers.policy import Policy, Vocabulary, policy_gradient
from orchestray.search.methods.controllers.server import ParameterServer
from orchestray.search.trials.one_shot.base import SharedTrial
from orchestray.search.trials.program import part

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.task import Batch
    from orchestray.search.spaces.architectures.base import Genome
    from orchestray.search.spaces.architectures.choices import Decision
    from orchestray.trainers.config.schema import TrainConfig

_WEIGHTS, _CONTROLLER, _JUDGED = range(3)


class EnasTrial(SharedTrial):
    """A trial of ENAS, whose steps train the weights of one network that the controller draws.

    This is the paper's Monte Carlo estimate with one sample (equation 1). Every `controller_every` steps the controller
    is updated by REINFORCE, with rewards on batches of the architecture's part of the data. At the end, drawn networks
    are ranked on a few such batches.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        metric: str | None = None,
        less_is_better: bool = False,
        controller_every: int = 10,
        controller_steps: int = 5,
        children: int = 4,
        hidden: int = 64,
        controller_learning_rate: float = 0.003,
        baseline_decay: float = 0.95,
        entropy_weight: float = 1e-3,
        num_judged: int = 32,
        **common: Any,
    ) -> None:
        """Take the arguments of the method `Enas` and of `OneShotTrial`; `less_is_better` refers to the metric."""
        super().__init__(config, **common)
        self._sign = -1.0 if less_is_better else 1.0
        self._metric, self._every, self._updates = metric, controller_every, controller_steps
        self._children, self._num_judged = children, num_judged
        self._baseline_decay, self._entropy_weight = baseline_decay, entropy_weight
        self._questions = Questions({}, self.space, "enas")
        self.policy = Policy(Vocabulary(), hidden=hidden, seed=self.seed)
        self._server = ParameterServer(self.policy.parameters, learning_rate=controller_learning_rate)
        self._baseline: float | None = None
        self.rewards: list[float | None] = []
        """Mean reward of each controller update; None: no network had a finite one, and nothing was learned."""

    def _train_step(self, batch: Batch, step: int) -> float:
        genome = self.draw(_WEIGHTS, step)
        loss = self._task.loss(self.supernet(batch["inputs"], genome), batch)
        self._update(self._optimizer, self._params, loss, step)
        if step % self._every == 0:
            for _ in range(self._updates):
                self._update_controller()
        return float(loss.detach())

    def draw(self, *key: int) -> Genome:
        """Draw a network from the controller."""
        return self._questions.genome(self._decisions(*key))

    def _decisions(self, *key: int) -> list[Decision]:
        return self.policy.draw(self._questions, rng_of(self.seed, *key))

    def _update_controller(self) -> None:
        number = len(self.rewards)
        batch = self._cast(self._judged_by.at(number))
        drawn = [self._decisions(_CONTROLLER, number, child) for child in range(self._children)]
        judged = [self.judge(self._questions.genome(decisions), batch) for decisions in drawn]
        finite = [reward for reward in judged if math.isfinite(reward)]
        if not finite:
            self.rewards.append(None)
            return
        # One that has diverged is as bad as the worst of the others: its reward would make the policy NaN for good.
        rewards = [reward if math.isfinite(reward) else min(finite) for reward in judged]
        mean = sum(rewards) / len(rewards)
        baseline = mean if self._baseline is None else self._baseline
        advantages = [reward - baseline for reward in rewards]
        gradients = policy_gradient(self.policy, drawn, advantages, entropy_weight=self._entropy_weight)
        self._server.push(gradients, self._server.versions, number=number + 1)
        self.policy.adopt(self._server.fetch())
        self._baseline = self._baseline_decay * baseline + (1 - self._baseline_decay) * mean
        self.rewards.append(mean)

    @torch.no_grad()
    def judge(self, genome: Genome, batch: Batch) -> float:
        """Return the score of a network with the shared weights on one batch.

        Batch norm uses the statistics of the batch, as in training: the running ones mix all networks.
        """
        return self._sign * self._reward(self.supernet(batch["inputs"], genome), batch, self._metric)

    def _find(self) -> list[Genome]:
        drawn: dict[str, Genome] = {}
        for number in range(self._num_judged):
            decisions = self._decisions(_JUDGED, self.step, number)
            drawn.setdefault(self._questions.key(decisions), self._questions.genome(decisions))
        return self._ranked(drawn.values(), self.judge, len(self.rewards))

    def _told(self) -> dict[str, Any]:
        return {"rewards": self.rewards[-20:], "controller_updates": len(self.rewards)}

    def _tensors(self) -> dict[str, Tensor]:
        return super()._tensors() | {f"controller/{k}": v for k, v in self._server.state_tensors().items()}

    def _position(self) -> dict[str, Any]:
        names = [list(name) for name in self.policy.vocabulary.names]
        return {"vocabulary": names, "baseline": self._baseline, "rewards": list(self.rewards)}

    def _load_tensors(self, tensors: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        super()._load_tensors(tensors, position)
        self.policy.vocabulary.load([(name, option) for name, option in position["vocabulary"]])
        self._server.load_state_tensors(part(tensors, "controller/"))
        self.policy.adopt(self._server.fetch())
        self._baseline, self.rewards = position["baseline"], list(position["rewards"])
