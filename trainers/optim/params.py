"""The parameters of optimizers (`train.optimizer`) and of learning-rate schedules (`train.lr_schedule`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self, TypeVar

from pydantic import ConfigDict, ValidationError, model_validator

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


class ParamGroup(Section):
    """Parameters for which some of the optimizer's keys have other values; all keys but `match` are such keys."""

    model_config = ConfigDict(extra="allow")

    match: Text
    """Pattern of the parameters' names, for example "*.bias"; the first group that matches counts."""


_OF_THE_WHOLE = ("type", "groups", "file", "source", "modules", "params")


class OptimizerSection(Section):
    """The keys that all optimizers share."""

    groups: tuple[ParamGroup, ...] = ()
    """Parameters with other values, by patterns of their names."""

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        own = {name: value for name, value in self.model_dump().items() if name != "groups"}
        known = [name for name in type(self).model_fields if name not in ("type", "groups")]
        for index, group in enumerate(self.groups):
            changes = group.model_extra or {}
            if reserved := [name for name in changes if name in _OF_THE_WHOLE]:
                raise ValueError(f"groups.{index}: {reserved[0]} is one for all parameters, not for a group")
            wrong = [name for name in changes if name not in known]
            if wrong and type(self).model_config.get("extra") != "allow":
                raise ValueError(f"groups.{index}: {wrong[0]} is not one of its keys: {', '.join(known)}")
            try:
                type(self).model_validate({**own, **changes})
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"]))
                raise ValueError(f"groups.{index}.{place}: {first['msg']}, got {first['input']!r}") from None
        return self


def values_of_groups(section: Section | None, path: str = "train.optimizer") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path in the config and the values of the optimizer, if there is one, then of each of its groups."""
    if section is None:
        return
    own = section.model_dump(exclude={"groups"})
    yield path, own
    for index, group in enumerate(getattr(section, "groups", ())):  # a section of one's own need not have them
        yield f"{path}.groups.{index}", {**own, **(group.model_extra or {})}


class Sgd(OptimizerSection):
    """Stochastic gradient descent."""

    type: Literal["sgd"]
    """The optimizer `sgd`."""
    lr: AboveZero
    """Learning rate."""
    momentum: AtLeastZero = 0.0
    """Part of the last update that is kept; 0: no momentum."""
    nesterov: Flag = False
    """True for Nesterov's momentum, which looks ahead before the gradient is applied."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty added to the gradient."""


class Adagrad(OptimizerSection):
    """Adagrad (Duchi et al., 2011): a rate per parameter from the sum of its squared gradients."""

    type: Literal["adagrad"]
    """The optimizer `adagrad`."""
    lr: AboveZero
    """Learning rate."""
    eps: AboveZero = 1e-10
    """Added to the denominator."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty added to the gradient."""


class RmsProp(OptimizerSection):
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


class Adam(OptimizerSection):
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


class AdamW(OptimizerSection):
    """AdamW (Loshchilov and Hutter, 2019): Adam with weight decay separate from the gradient."""

    type: Literal["adamw"]
    """The optimizer `adamw`."""
    lr: AboveZero
    """Learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decays of the moving means of the gradient and of its square."""
    eps: AboveZero = 1e-8
    """Added to the denominator."""
    weight_decay: AtLeastZero = 0.01
    """Part of the weights, times the rate, that is subtracted at each step."""


class Lars(OptimizerSection):
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
    """Largest movement of a layer in a step, relative to its norm."""
    eps: AtLeastZero = 1e-8
    """Added to the denominator of the trust ratio."""


class Lamb(OptimizerSection):
    """LAMB (You et al., 2020): Adam with a rate per layer, for batches of thousands of samples."""

    type: Literal["lamb"]
    """The optimizer `lamb`."""
    lr: AboveZero
    """Learning rate: movement of a layer in a step, relative to its norm."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decays of the moving means of the gradient and of its square."""
    eps: AboveZero = 1e-6
    """Added to the denominator."""
    weight_decay: AtLeastZero = 0.01
    """Part of the weights that is added to the step before its norm is taken."""


class Kfac(OptimizerSection):
    """K-FAC (Martens and Grosse, 2015): steps by the curvature of each layer, as a product of two small matrices."""

    type: Literal["kfac"]
    """The optimizer `kfac`."""
    lr: AboveZero
    """Learning rate."""
    damping: AboveZero = 0.001
    """Added to the curvature, spread over the two matrices by their sizes."""
    momentum: AtLeastZero = 0.9
    """Part of the last update that is kept."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty added to the gradient."""
    decay: BelowOne = 0.95
    """Decay of the moving means of the two matrices."""
    statistics_every_steps: Positive = 1
    """Number of steps between two measurements of the matrices."""
    inverse_every_steps: Positive = 10
    """Number of steps between two inversions, and so the largest age of an inverse in use."""
    kl_clip: AboveZero | None = 0.001
    """Largest squared length of a step as the curvature measures it; null: any."""
    inverse_fraction: ZeroToOne = 1.0
    """Fraction of the replicas, one at least, that holds a layer's inverses; the others get its step at every step."""
    statistics_workers: Positive | None = None
    """Number of replicas that measure, on their shares of the batch, and invert; null: all, on the whole batch."""

    @model_validator(mode="after")
    def _check_rhythm(self) -> Self:
        if self.inverse_every_steps % self.statistics_every_steps:
            raise ValueError(
                f"inverse_every_steps must be a multiple of statistics_every_steps ({self.statistics_every_steps}), "
                f"got {self.inverse_every_steps}"
            )
        return self


class NaturalGradient(OptimizerSection):
    """NG-SGD (Povey et al., 2015): the gradient times the inverse of the Fisher matrix, as a matrix of rates."""

    type: Literal["natural_gradient"]
    """The optimizer `natural_gradient`."""
    lr: AboveZero
    """Learning rate, for errors of unit variance."""
    damping: AboveZero = 0.01
    """Added to the Fisher matrix, spread over its two factors by their sizes."""
    momentum: AtLeastZero = 0.0
    """Part of the last update that is kept."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty added to the gradient."""
    decay: BelowOne = 0.95
    """Decay of the moving means of the two factors."""
    every_steps: Positive = 4
    """Number of steps between two measurements of the factors, which are then inverted."""


class Muon(OptimizerSection):
    """Muon (Jordan et al., 2024): momentum whose step of a matrix is made orthogonal; AdamW for all else."""

    type: Literal["muon"]
    """The optimizer `muon`."""
    lr: AboveZero
    """Learning rate, in the size of AdamW's."""
    momentum: BelowOne = 0.95
    """Part of the last update of a matrix that is kept."""
    nesterov: Flag = True
    """True for Nesterov's momentum."""
    weight_decay: AtLeastZero = 0.1
    """Part of the weights, times the rate, that is subtracted at each step."""
    ns_steps: Positive = 5
    """Number of Newton-Schulz iterations that make a step orthogonal."""
    adamw: tuple[Text, ...] = ("*embed*", "*head*")
    """Patterns of the names of matrices that move by AdamW, as embeddings and the last layer should."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decays of AdamW's moving means."""
    eps: AboveZero = 1e-8
    """Added to AdamW's denominator."""


class Soap(OptimizerSection):
    """SOAP (Vyas et al., 2024): AdamW in the eigenbasis of each matrix's gradients; AdamW for all else."""

    type: Literal["soap"]
    """The optimizer `soap`."""
    lr: AboveZero
    """Learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.95, 0.95)
    """Decays of the moving means of the gradient, and of its square and its products."""
    eps: AboveZero = 1e-8
    """Added to the denominator."""
    weight_decay: AtLeastZero = 0.01
    """Part of the weights, times the rate, that is subtracted at each step."""
    every_steps: Positive = 10
    """Number of steps between two changes of the bases."""
    max_size: Positive = 1024
    """Largest side of a matrix that has bases; larger ones move by AdamW."""


class YellowFin(OptimizerSection):
    """YellowFin (Zhang and Mitliagkas, 2019): tunes momentum and learning rate by measurements of the gradients."""

    type: Literal["yellowfin"]
    """The optimizer `yellowfin`."""
    lr: AboveZero = 1.0
    """Factor on the tuned rate."""
    beta: BelowOne = 0.999
    """Decay of the moving means."""
    window: Positive = 20
    """Number of gradients from which the range of the curvature is estimated."""
    slow_start: Flag = True
    """True to reduce the rate in the first 10 windows."""
    weight_decay: AtLeastZero = 0.0
    """L2 penalty added to the gradient."""


Extended = TypeVar("Extended", bound=Section)


def refuse_nan(section: Extended) -> Extended:
    """Return a section whose further keys are arguments of a class.

    Raises:
        ValueError: a number among them is NaN, which classes take without a word.
    """
    if wrong := [name for name, value in (section.model_extra or {}).items() if value != value]:
        raise ValueError(f"{' and '.join(wrong)} must be a number, got nan")
    return section


class OptimizerClass(OptimizerSection):
    """A class of `torch.optim`, or one of your own; all other keys are arguments of its constructor."""

    model_config = ConfigDict(extra="allow")

    _without_nan = model_validator(mode="after")(refuse_nan)

    type: Text
    """Class: "torch.optim:NAdam", "package.module:Class" or "path/to/file.py:Class"."""
    lr: AboveZero
    """Learning rate."""


class AverageSection(Section):
    """The keys that all averages of the weights share."""

    every_steps: Positive | None = None
    """Number of steps between two weights that are averaged."""
    from_step: Count | None = None
    """Number of steps before the first that counts; or give `from_epoch`."""
    from_epoch: Count | None = None
    """Number of epochs before the first step that counts; or give `from_step`."""

    @model_validator(mode="after")
    def _check_begin(self) -> Self:
        if self.from_step is not None and self.from_epoch is not None:
            raise ValueError("from_step and from_epoch both say when the average begins; give one of them")
        return self


class Ema(AverageSection):
    """An exponential moving average of the weights: decay x average + (1 - decay) x weights."""

    type: Literal["ema"]
    """The average `ema`."""
    decay: BelowOne = 0.999
    """Part of the average that stays."""
    every_steps: Positive = 1
    """Number of steps between two weights that are averaged."""


class Swa(AverageSection):
    """The mean of the weights (Izmailov et al., 2018)."""

    type: Literal["swa"]
    """The average `swa`."""


class Schedule(Section):
    """The parameters that all schedules share."""

    type: Text
    """Name of the schedule."""
    warmup_steps: Count = 0
    """Number of steps over which the rate first rises linearly to `lr`."""


class Constant(Schedule):
    """A constant rate."""

    type: Literal["constant"] = "constant"
    """The schedule `constant`."""


class Step(Schedule):
    """A rate that is multiplied by `gamma` every `every_steps` steps."""

    type: Literal["step"]
    """The schedule `step`."""
    every_steps: Positive
    """Number of steps between two drops."""
    gamma: AboveZero = 0.1
    """Factor of a drop."""


class Cosine(Schedule):
    """A rate that falls along half a cosine to `min_factor` times `lr` (Loshchilov and Hutter, 2017)."""

    type: Literal["cosine"]
    """The schedule `cosine`."""
    total_steps: Positive | None = None
    """Step at which the rate reaches its final value; null: the run's last step."""
    min_factor: ZeroToOne = 0.0
    """Final rate as a fraction of `lr`."""


class Linear(Schedule):
    """A rate that falls linearly to `end_factor` times `lr`."""

    type: Literal["linear"]
    """The schedule `linear`."""
    total_steps: Positive | None = None
    """Step at which the rate reaches its final value; null: the run's last step."""
    end_factor: ZeroToOne = 0.0
    """Final rate as a fraction of `lr`."""


class ScheduleClass(Schedule):
    """A class of `torch.optim.lr_scheduler`, or one of your own; all other keys are arguments of its constructor."""

    model_config = ConfigDict(extra="allow")

    _without_nan = model_validator(mode="after")(refuse_nan)

    type: Text
    """Class: "torch.optim.lr_scheduler:CosineAnnealingWarmRestarts", "package.module:Class" or "file.py:Class"."""
