"""The `train.optimizer` and `train.lr_schedule` sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestray.platform.config.base import (
    AboveZero,
    AtLeastZero,
    BelowOne,
    Count,
    Flag,
    Positive,
    Section,
    Text,
    ZeroToOne,
)


class Sgd(Section):
    """Stochastic gradient descent."""

    type: Literal["sgd"]
    """The optimizer `sgd`."""
    lr: AboveZero
    """Learning rate."""
    momentum: AtLeastZero = 0.0
    """Part of the last update that is kept; 0 for none."""
    nesterov: Flag = False
    """Nesterov's momentum: look ahead before the gradient is applied."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty added to the gradient."""


class Adagrad(Section):
    """Adagrad (Duchi et al., 2011): a rate per parameter from the sum of its squared gradients."""

    type: Literal["adagrad"]
    """The optimizer `adagrad`."""
    lr: AboveZero
    """Learning rate."""
    eps: AboveZero = 1e-10
    """Added to the denominator."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty added to the gradient."""


class RmsProp(Section):
    """RMSProp (Hinton, 2012): a rate per parameter from a moving mean of its squared gradients."""

    type: Literal["rmsprop"]
    """The optimizer `rmsprop`."""
    lr: AboveZero
    """Learning rate."""
    alpha: BelowOne = 0.99
    """Decay of the moving mean."""
    eps: AboveZero = 1e-8
    """Added to the denominator."""
    momentum: AtLeastZero = 0.0
    """Part of the last update that is kept."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty added to the gradient."""


class Adam(Section):
    """Adam (Kingma and Ba, 2015)."""

    type: Literal["adam"]
    """The optimizer `adam`."""
    lr: AboveZero
    """Learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decays of the moving means of the gradient and of its square."""
    eps: AboveZero = 1e-8
    """Added to the denominator."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty added to the gradient."""


class AdamW(Section):
    """AdamW (Loshchilov and Hutter, 2019): Adam with weight decay apart from the gradient."""

    type: Literal["adamw"]
    """The optimizer `adamw`."""
    lr: AboveZero
    """Learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decays of the moving means of the gradient and of its square."""
    eps: AboveZero = 1e-8
    """Added to the denominator."""
    weight_decay: AtLeastZero = 0.01
    """Part of the weights, times the rate, taken off at each step."""


class Lars(Section):
    """LARS (You et al., 2017): a rate per layer, for batches of thousands of samples."""

    type: Literal["lars"]
    """The optimizer `lars`."""
    lr: AboveZero
    """Learning rate."""
    momentum: AtLeastZero = 0.9
    """Part of the last update that is kept."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty, inside the layer's trust ratio."""
    trust_coefficient: AboveZero = 0.001
    """How far a layer may move in a step, relative to its norm."""
    eps: AtLeastZero = 1e-8
    """Added to the denominator of the trust ratio."""


class YellowFin(Section):
    """YellowFin (Zhang and Mitliagkas, 2019): tunes momentum and learning rate by what it measures of the gradients."""

    type: Literal["yellowfin"]
    """The optimizer `yellowfin`."""
    lr: AboveZero = 1.0
    """Factor on the tuned rate."""
    beta: BelowOne = 0.999
    """Part of each average that is kept from step to step."""
    window: Positive = 20
    """Gradients that the range of the curvature is taken from."""
    slow_start: Flag = True
    """Whether the rate is kept down in the first 10 windows."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty added to the gradient."""


Optimizer = Annotated[Sgd | Adagrad | RmsProp | Adam | AdamW | Lars | YellowFin, Field(discriminator="type")]


class Schedule(Section):
    """What every schedule has."""

    type: Text
    """Which schedule."""
    warmup_steps: Count = 0
    """Steps over which the rate first rises linearly to `lr`."""


class Constant(Schedule):
    """The rate stays as it is."""

    type: Literal["constant"] = "constant"
    """The schedule `constant`."""


class Step(Schedule):
    """The rate is multiplied by `gamma` every `every_steps` steps."""

    type: Literal["step"]
    """The schedule `step`."""
    every_steps: Positive
    """Steps between two drops."""
    gamma: AboveZero = 0.1
    """Factor of a drop."""


class Cosine(Schedule):
    """The rate falls along half a cosine to `min_factor` times `lr` (Loshchilov and Hutter, 2017)."""

    type: Literal["cosine"]
    """The schedule `cosine`."""
    total_steps: Positive | None = None
    """Step at which the rate has fallen; null: the run's last step."""
    min_factor: ZeroToOne = 0.0
    """What is left of the rate at the end."""


class Linear(Schedule):
    """The rate falls linearly to `end_factor` times `lr`."""

    type: Literal["linear"]
    """The schedule `linear`."""
    total_steps: Positive | None = None
    """Step at which the rate has fallen; null: the run's last step."""
    end_factor: ZeroToOne = 0.0
    """What is left of the rate at the end."""


LrSchedule = Annotated[Constant | Step | Cosine | Linear, Field(discriminator="type")]
