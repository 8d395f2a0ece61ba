"""A network that learns to generate the weights of networks drawn from a space: SMASH.

Brock et al., "SMASH: One-Shot Model Architecture Search through HyperNetworks", ICLR 2018, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call

from orchestray.search.methods.base import rng_of
from orchestray.search.spaces.architectures.base import key_of
from orchestray.search.trials.one_shot.base import OneShotTrial
from orchestray.search.trials.one_shot.hypernetwork import HyperNetwork
from orchestray.search.trials.program import part
from orchestray.trainers.optim.clipping import clip

if TYPE_CHECKING:
    from orchestray.platform.task import Batch
    from orchestray.search.spaces.architectures.base import Genome
    from orchestray.trainers.config.schema import TrainConfig
    from orchestray.trainers.optim.optimizers import Optimizer

_TRAINED, _JUDGED, _EXPECTED = range(3)
_NUM_EXPECTED = 32


class SmashTrial(OneShotTrial):
    """A trial of SMASH, whose steps draw a network, generate its weights, and train the generator by its loss.

    At the end, drawn networks with generated weights are ranked on a few batches of the architecture's part of the
    data.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        hidden: int = 64,
        num_judged: int = 64,
        metric: str | None = None,
        less_is_better: bool = False,
        **common: Any,
    ) -> None:
        """Take the arguments of the method `Smash` and of `OneShotTrial`; `less_is_better` refers to the metric."""
        super().__init__(config, **common)
        self._sign = -1.0 if less_is_better else 1.0
        self._num_judged, self._metric = num_judged, metric
        self.writer = HyperNetwork(hidden=hidden, seed=self.seed, dtype=self._dtype, device=self._device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            for number in range(_NUM_EXPECTED):
                self.writer.expect(self._build(self.space.sample(rng_of(self.seed, _EXPECTED, number))))
        self._optimizers: dict[str, Optimizer] = {}
        """Optimizer of each parameter, created when the parameter first occurs."""

    def _train_step(self, batch: Batch, step: int) -> float:
        genome = self.space.sample(rng_of(self.seed, _TRAINED, step))
        network = self._build(genome).train()
        written = self.writer.write(genome, network)
        loss = self._task.loss(functional_call(network, written, (batch["inputs"],)), batch)
        names = list(self.writer.parameters)
        params = [self.writer.parameters[name] for name in names]
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        if self._settings.grad_clip is not None:
            clip(grads, self._settings.grad_clip)
        for name, parameter, grad in zip(names, params, grads, strict=True):
            if grad is not None:
                self._optimizer_of(name).step([parameter], [grad], self._lr(step))
        return float(loss.detach())

    def _optimizer_of(self, name: str) -> Optimizer:
        if name not in self._optimizers:
            self._optimizers[name] = self._make_optimizer([(name, self.writer.parameters[name])])
        return self._optimizers[name]

    @torch.no_grad()
    def judge(self, genome: Genome, batch: Batch) -> float:
        """Return the score of a network with generated weights on one batch, whose statistics batch norm uses."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            network = self._build(genome).train()
            outputs = functional_call(network, self.writer.write(genome, network), (batch["inputs"],))
        return self._sign * self._reward(outputs, batch, self._metric)

    def _find(self) -> list[Genome]:
        drawn: dict[str, Genome] = {}
        for number in range(self._num_judged):
            genome = self.space.sample(rng_of(self.seed, _JUDGED, number))
            drawn.setdefault(key_of(self.space, genome), genome)
        return self._ranked(drawn.values(), self.judge, 0)

    @torch.no_grad()
    def child_state(self, genome: Genome) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            network = self._build(genome)
        return {name: tensor.clone() for name, tensor in self.writer.write(genome, network).items()}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"writer/{name}": tensor for name, tensor in self.writer.parameters.items()}
        for optimizer in self._optimizers.values():
            tensors |= {f"optimizer/{k}": v for k, v in optimizer.state_tensors().items()}
        return tensors

    def _position(self) -> dict[str, Any]:
        return {"optimized": list(self._optimizers)}

    def _load_tensors(self, tensors: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        self.writer.load(part(tensors, "writer/"))
        self._optimizers = {}
        of_optimizers = part(tensors, "optimizer/")
        for name in position["optimized"]:
            state = {k: v for k, v in of_optimizers.items() if k.rpartition(".")[0] == name}
            self._optimizer_of(name).load_state_tensors(state)
