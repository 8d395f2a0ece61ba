"""A network that learns to generate the weights of networks drawn from a space: SMASH.

Brock et al., "SMASH: One-Shot Model Architecture Search through HyperNetworks", ICLR 2018, algorithm 1. The
weights of all 1 x 1 convolutions of ops are generated; the others are shared and learned with the HyperNet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call

from orchestray.search.methods.base import rng_of
from orchestray.search.spaces.architectures.base import key_of
from orchestray.search.trials.one_shot.base import OneShotTrial, standing
from orchestray.search.trials.one_shot.hypernetwork import HyperNet
from orchestray.search.trials.program import part
from orchestray.trainers.optim.grouped_optimizer import check_matches

if TYPE_CHECKING:
    from orchestray.platform.task import Batch
    from orchestray.search.spaces.architectures.base import Genome
    from orchestray.trainers.config.schema import TrainConfig

_TRAINED, _JUDGED, _PERTURBED = range(3)


class SmashTrial(OneShotTrial):
    """A trial of SMASH, whose steps draw a network, generate its weights, and train the HyperNet by its loss.

    At the end, drawn networks with generated weights are ranked on a few batches of the architecture's part of the
    data. The best is perturbed again and again.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        hidden: int = 32,
        num_judged: int = 64,
        num_perturbed: int = 32,
        metric: str | None = None,
        less_is_better: bool = False,
        **common: Any,
    ) -> None:
        """Take the arguments of the method `Smash` and of `OneShotTrial`; `less_is_better` refers to the metric."""
        super().__init__(config, **common)
        self._sign = -1.0 if less_is_better else 1.0
        self._num_judged, self._num_perturbed, self._metric = num_judged, num_perturbed, metric
        space: Any = self.space
        writer = HyperNet(space, *self._task.shapes(), hidden=hidden, seed=self._settings.seed)
        self.writer = writer.to(self._device, self._dtype)
        self._named = list(self.writer.named_parameters())
        self._params = [parameter for _, parameter in self._named]
        check_matches(self._settings.optimizer.get("groups", ()), self._named)
        self._optimizer = self._make_optimizer(self._named)

    def _train_step(self, batch: Batch, step: int) -> float:
        genome = self.space.sample(rng_of(self.seed, _TRAINED, step))
        network = self._build(genome).train()
        written = self.writer.write(genome, network)
        loss = self._task.loss(functional_call(network, written, (batch["inputs"],)), batch)
        self._update(self._optimizer, self._params, loss, step)
        return float(loss.detach())

    @torch.no_grad()
    def judge(self, genome: Genome, batch: Batch) -> float:
        """Return the score of a network with generated weights on one batch, whose statistics batch norm uses."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            network = self._build(genome).train()
            outputs = functional_call(network, self.writer.write(genome, network), (batch["inputs"],))
        return self._sign * self._reward(outputs, batch, self._metric)

    def _find(self) -> list[Genome]:
        """Rank drawn networks, then perturb the best so far one choice at a time (section 3.3)."""
        batches = self._ranking_batches(0)
        scores: dict[str, tuple[tuple[int, float], Genome]] = {}

        def score(genome: Genome) -> tuple[int, float]:
            key = key_of(self.space, genome)
            if key not in scores:
                scores[key] = (standing(self.judge(genome, batch) for batch in batches), genome)
            return scores[key][0]

        drawn = [self.space.sample(rng_of(self.seed, _JUDGED, number)) for number in range(self._num_judged)]
        best = max(drawn, key=score)
        for number in range(self._num_perturbed):
            other = self.space.mutate(best, rng_of(self.seed, _PERTURBED, number))
            best = max(best, other, key=score)
        return [genome for _, genome in sorted(scores.values(), key=lambda one: one[0], reverse=True)]

    @torch.no_grad()
    def child_state(self, genome: Genome) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            network = self._build(genome)
        return {name: tensor.clone() for name, tensor in self.writer.write(genome, network).items()}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"writer/{name}": parameter for name, parameter in self._named}
        return tensors | {f"optimizer/{name}": t for name, t in self._optimizer.state_tensors().items()}

    def _load_tensors(self, tensors: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        self.writer.load_state_dict(part(tensors, "writer/"))
        self._optimizer.load_state_tensors(part(tensors, "optimizer/"))
