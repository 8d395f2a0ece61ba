"""Binarized neural networks: weights and inputs of layers are -1 or 1.

Hubara, Courbariaux, Soudry, El-Yaniv and Bengio, "Binarized Neural Networks" (2016), sections 1.1 (the sign, equation
1), 1.3 (the gradient, equation 4; clipped weights) and algorithm 1.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from orchestray.trainers.few_bits.base import Quantizer, Scheme, straight_through


class Bnn(Scheme):
    """Signs of weights and inputs. Inputs of the model's first layer stay, as in section 1.5."""

    def prepare(self, model: nn.Module) -> None:
        """Replace each `nn.ReLU` by hard tanh, whose sign the next layer takes: behind a ReLU all signs would be 1."""
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.ReLU):
                    setattr(module, name, nn.Hardtanh())

    def weights(self) -> nn.Module:
        return WeightSign()

    def inputs(self) -> nn.Module:
        return Sign()


class Sign(Quantizer):
    """The sign of each value, 1 for 0, with the gradient of hard tanh: none beyond -1 and 1."""

    def forward(self, values: Tensor) -> Tensor:
        held = values.detach()
        signs = torch.where(held >= 0, 1.0, -1.0).to(held.dtype)
        return straight_through(values, self.keep_example(signs), held.abs() <= 1)


class WeightSign(Sign):
    """The sign of each weight; after an update the real weights are clipped to -1 and 1 (section 1.3)."""

    bound: ClassVar[float] = 1.0
