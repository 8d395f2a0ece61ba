"""The parameters of the methods that share weights between networks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from orchestray.platform.config.base import AboveZero, AtLeastZero, BelowOne, Flag, Fraction, Positive, Text, Whole
from orchestray.platform.config.problems import Problem
from orchestray.search.methods.params import MethodSection, Searched


class OneShot(MethodSection):
    """The parameters that all methods with shared weights have."""

    searches = "architecture"
    shares_weights = True
    why_not_within = "trains one network for all candidates, in a trial that must not be ended early; use it by itself"

    search_steps: Positive | None = None
    """Training steps of the shared weights; null: four times those of a trial."""
    finalists: Positive = 2
    """Networks found that are then trained separately."""
    inherit: Flag = False
    """The finalists start from the shared weights instead of from scratch."""
    architecture_part: Fraction = 0.5
    """Part of the training data that the architecture is judged by; the weights are trained on the rest."""

    def problems(self, place: str, searched: Searched) -> Iterator[Problem]:
        yield from super().problems(place, searched)
        trials = searched.trials
        if trials is not None and self.finalists >= trials and not self.is_default("finalists"):
            yield Problem(
                f"{place}.finalists",
                f"must be at most {trials - 1}, the budget's trials ({trials}) without the one that trains the shared "
                f"weights, got {self.finalists}; raise search.budget.trials",
            )


class Enas(OneShot):
    """All candidates share one set of weights (Pham et al., 2018)."""

    type: Literal["enas"]
    """The method `enas`."""
    metric: Text | None = None
    """Metric of the task that rewards the controller, to be maximised unless its name says otherwise; null: the
    search's first objective."""
    controller_every: Positive = 10
    """Steps of the shared weights between two turns of the controller."""
    controller_steps: Positive = 5
    """Updates of the controller in each turn."""
    children: Positive = 4
    """Networks per update of the controller."""
    hidden: Positive = 64
    """Units of the controller's LSTM."""
    controller_learning_rate: AboveZero = 0.003
    """Learning rate of Adam, for the controller."""
    baseline_decay: BelowOne = 0.95
    """Decay of the moving average of rewards."""
    entropy_weight: AtLeastZero = 1e-3
    """Added reward for each nat of entropy of the policy."""
    num_judged: Positive = 32
    """Networks drawn at the end, of which the best by the shared weights are the finalists."""


class Darts(OneShot):
    """The architecture as weights found by gradients (Liu et al., 2019)."""

    type: Literal["darts"]
    """The method `darts`."""
    order: Annotated[Whole, Field(ge=1, le=2)] = 1
    """2: the architecture's gradient looks one step of the weights ahead; 1: it uses the current weights."""
    architecture_learning_rate: AboveZero = 0.003
    """Learning rate of Adam, for the architecture."""
    architecture_weight_decay: AtLeastZero = 1e-3
    """Weight decay of Adam, for the architecture."""
    warmup_part: BelowOne = 0.2
    """Part of the steps in which only the weights are trained."""


class Smash(OneShot):
    """A HyperNet that generates the weights of networks of memory banks (Brock et al., 2018)."""

    type: Literal["smash"]
    """The method `smash`."""
    hidden: Positive = 32
    """Channels of each convolution of the HyperNet."""
    num_judged: Positive = 64
    """Networks drawn at the end, and judged with generated weights."""
    num_perturbed: Annotated[Whole, Field(ge=0)] = 32
    """Networks judged after these, each the best so far with one choice changed; the best of all are the finalists."""
    metric: Text | None = None
    """Metric of the task that they are judged by, to be maximised unless its name says otherwise; null: the
    search's first objective."""
