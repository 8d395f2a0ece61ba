"""Alternating gradient updates of weights and architecture, each on its own data: DARTS.

Liu et al., "DARTS: Differentiable Architecture Search", ICLR 2019, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from orchestray.search.trials.one_shot.base import SharedTrial
from orchestray.search.trials.one_shot.bilevel import architecture_gradient
from orchestray.search.trials.program import part
from orchestray.trainers.optim.adaptive import Adam

if TYPE_CHECKING:
    from orchestray.platform.task import Batch
    from orchestray.search.spaces.architectures.base import Genome
    from orchestray.trainers.config.schema import TrainConfig

_BETAS = (0.5, 0.999)
"""Coefficients of Adam for the architecture (appendix A.1.1)."""
_INITIAL = 1e-3


class _Mixed(nn.Module):
    """The mixed network of all operations, as a function of the architecture."""

    def __init__(self, supernet: nn.Module) -> None:
        super().__init__()
        self.supernet = supernet

    def forward(self, inputs: Tensor, alphas: Mapping[str, Tensor]) -> Tensor:
        supernet: Any = self.supernet
        outputs: Tensor = supernet.forward_mixed(inputs, alphas)
        return outputs


class DartsTrial(SharedTrial):
    """A trial of DARTS, whose steps update first the architecture (after the warm-up), then the weights.

    Each update uses a batch of its own part of the data.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        order: int = 1,
        architecture_learning_rate: float = 0.003,
        architecture_weight_decay: float = 1e-3,
        warmup_part: float = 0.2,
        **common: Any,
    ) -> None:
        """Take the arguments of the method `Darts` and of `OneShotTrial`."""
        super().__init__(config, **common)
        self._order, self._alpha_lr = order, architecture_learning_rate
        self._warmup_steps = round(warmup_part * (self._settings.steps or 0))
        self._mixed = _Mixed(self.supernet)
        generator = torch.Generator().manual_seed(self.seed)
        shapes = self.supernet.alpha_shapes
        self.alphas = {
            name: _INITIAL * torch.randn(shape, generator=generator, dtype=self._dtype).to(self._device)
            for name, shape in shapes.items()
        }
        self._alpha_optimizer = Adam(betas=_BETAS, weight_decay=architecture_weight_decay)
        self._alpha_optimizer.init(self.alphas.items())

    def _train_step(self, batch: Batch, step: int) -> float:
        if step > self._warmup_steps:
            self._update_architecture(batch, step)
        loss = self._loss(self._params, list(self.alphas.values()), batch)
        self._update(self._optimizer, self._params, loss, step)
        return float(loss.detach())

    def _update_architecture(self, batch: Batch, step: int) -> None:
        judged = self._cast(self._judged_by.at(step - 1))
        alphas = list(self.alphas.values())
        buffers = {name: buffer.clone() for name, buffer in self.supernet.named_buffers()}
        grads = architecture_gradient(
            lambda weights, architecture: self._loss(weights, architecture, batch),
            lambda weights, architecture: self._loss(weights, architecture, judged),
            self._params,
            alphas,
            weights_lr=self._lr(step) if self._order == 2 else 0.0,
        )
        self.supernet.load_state_dict(buffers, strict=False)  # undo the trial points' batch-norm statistics
        self._alpha_optimizer.step(alphas, grads, self._alpha_lr)

    def _loss(self, weights: Sequence[Tensor], alphas: Sequence[Tensor], batch: Batch) -> Tensor:
        named = {f"supernet.{name}": weight for (name, _), weight in zip(self._named, weights, strict=True)}
        architecture = dict(zip(self.alphas, alphas, strict=True))
        return self._task.loss(functional_call(self._mixed, named, (batch["inputs"], architecture)), batch)

    def _find(self) -> list[Genome]:
        return [self.supernet.genome_of_alphas(self.alphas)]

    def _told(self) -> dict[str, Any]:
        shares = {name: torch.softmax(alpha, dim=1).tolist() for name, alpha in self.alphas.items()}
        steps = [int(t) for name, t in self._alpha_optimizer.state_tensors().items() if name.endswith(".step")]
        return {"alphas": shares, "architecture_updates": max(steps, default=0)}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = super()._tensors() | {f"alpha/{name}": alpha for name, alpha in self.alphas.items()}
        return tensors | {f"alpha_optimizer/{k}": v for k, v in self._alpha_optimizer.state_tensors().items()}

    def _load_tensors(self, tensors: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        super()._load_tensors(tensors, position)
        for name, alpha in part(tensors, "alpha/").items():
            self.alphas[name].copy_(alpha)
        self._alpha_optimizer.load_state_tensors(part(tensors, "alpha_optimizer/"))
