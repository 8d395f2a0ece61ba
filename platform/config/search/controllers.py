"""Methods that learn what to build, as a search config names them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestray.platform.config.base import (
    AboveZero,
    AtLeastZero,
    BelowOne,
    Count,
    Flag,
    Fraction,
    Positive,
    Section,
    Text,
    Whole,
    ZeroToOne,
)


class Reinforce(Section):
    """A controller learns by reward what to build (Zoph and Le, 2017)."""

    type: Literal["reinforce"]
    """The method `reinforce`."""
    children: Positive = 8
    """Networks of an update of a controller."""
    controllers: Positive = 1
    """Controllers that share their parameters at a server."""
    shards: Positive = 1
    """Shards of that server."""
    hidden: Positive = 35
    """Units of the LSTM."""
    learning_rate: AboveZero = 0.01
    """Of Adam, for the controller (the paper's 0.0006 is for thousands of networks)."""
    baseline_decay: BelowOne = 0.8
    """Of the moving average of scores that is taken off the reward."""
    entropy_weight: AtLeastZero = 0.0
    """Added reward for each nat of entropy of the policy."""
    repeats: Positive = 200
    """Known networks drawn in a row that end the search: the policy has settled."""


class QLearning(Section):
    """Q-learning of layers or of a block (Baker et al., 2017; Zhong et al., 2018)."""

    type: Literal["q_learning"]
    """The method `q_learning`."""
    memory: Count | None = 2
    """Answers before a choice that tell its state from others; null: all of them."""
    learning_rate: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.1
    """Part of the way that a value goes to what was seen."""
    discount: ZeroToOne = 1.0
    """Of what comes a choice later."""
    exploration: ZeroToOne = 0.55
    """Part of the trials that is drawn evenly; over the rest epsilon falls from 0.9 to 0.1."""
    replay: Count = 32
    """Evaluated networks that are learned from again after each trial."""
    shaped: Flag = False
    """Give every choice an equal part of the score (BlockQNN)."""
    repeats: Positive = 50
    """Known networks drawn in a row before answers are drawn evenly, and again before the search ends."""


class Progressive(Section):
    """From simple to complex cells, led by a predictor (Liu et al., 2018)."""

    type: Literal["progressive"]
    """The method `progressive`."""
    beam: Positive = 8
    """Networks that are tried, and then grown, at each level."""
    grow_by: Text | None = None
    """The number of the space (`nodes` of `cell`), or the choice, that says how complex a network is; null: choices are
    opened in stretches."""
    levels: Positive = 3
    """Such stretches."""
    candidates: Positive = 1000
    """Most networks that the predictor is asked about at a level."""


class OneShot(Section):
    """What the methods have in common that train one set of weights for all networks."""

    search_steps: Positive | None = None
    """Steps that the shared weights are trained; null: four times those of a trial."""
    finalists: Positive = 2
    """Networks found that are then trained by themselves."""
    inherit: Flag = False
    """The finalists start from the shared weights, in place of anew."""
    architecture_part: Fraction = 0.5
    """Part of the training data that the architecture is judged by; the weights are trained on the rest."""


class Enas(OneShot):
    """All candidates share one set of weights (Pham et al., 2018)."""

    type: Literal["enas"]
    """The method `enas`."""
    metric: Text | None = None
    """Metric of the task that rewards the controller, to be maximised; null: the search's first objective."""
    controller_every: Positive = 10
    """Steps of the shared weights between two turns of the controller."""
    controller_steps: Positive = 5
    """Updates of the controller in its turn."""
    children: Positive = 4
    """Networks of an update of the controller."""
    hidden: Positive = 64
    """Units of the controller's LSTM."""
    controller_learning_rate: AboveZero = 0.003
    """Of Adam, for the controller."""
    baseline_decay: BelowOne = 0.95
    """Of the moving average of rewards."""
    entropy_weight: AtLeastZero = 1e-3
    """Added reward for each nat of entropy of the policy."""
    num_judged: Positive = 32
    """Networks drawn at the end, of which the best by the shared weights are the finalists."""


class Darts(OneShot):
    """The architecture as weights found by gradients (Liu et al., 2019)."""

    type: Literal["darts"]
    """The method `darts`."""
    order: Annotated[Whole, Field(ge=1, le=2)] = 1
    """2: the architecture's gradient looks a step of the weights ahead; 1: it takes them as they are."""
    architecture_learning_rate: AboveZero = 0.003
    """Of Adam, for the architecture."""
    architecture_weight_decay: AtLeastZero = 1e-3
    """Of Adam, for the architecture."""
    warmup_part: BelowOne = 0.2
    """Part of the steps in which only the weights are trained."""


class Smash(OneShot):
    """A network that writes the weights of others (Brock et al., 2018)."""

    type: Literal["smash"]
    """The method `smash`."""
    hidden: Positive = 64
    """Units of the network that writes."""
    num_judged: Positive = 64
    """Networks drawn at the end, of which the best by written weights are the finalists."""
    metric: Text | None = None
    """Metric of the task that they are judged by, to be maximised; null: the search's first objective."""


ControllerMethod = Reinforce | QLearning | Progressive | Enas | Darts | Smash
