"""The parameters of the methods that learn which network to build."""

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
    Text,
    ZeroToOne,
)
from orchestray.search.methods.params import MethodSection


class Reinforce(MethodSection):
    """A controller that learns by reward which network to build (Zoph and Le, 2017)."""

    counts = ("children",)

    type: Literal["reinforce"]
    """The method `reinforce`."""
    children: Positive = 8
    """Networks per update of a controller."""
    controllers: Positive = 1
    """Controllers that share their parameters through a server. Several are processes of their own, like the shards."""
    shards: Positive = 1
    """Shards of that server; several are processes of their own, and so is each controller."""
    hidden: Positive = 35
    """Units of the LSTM."""
    learning_rate: AboveZero = 0.01
    """Learning rate of Adam, for the controller (the paper's 0.0006 is for thousands of networks)."""
    baseline_decay: BelowOne = 0.8
    """Decay of the moving average of scores that is subtracted from the reward."""
    entropy_weight: AtLeastZero = 0.0
    """Added reward for each nat of entropy of the policy."""
    repeats: Positive = 200
    """Known networks drawn in a row after which the search ends: the policy has settled."""


class QLearning(MethodSection):
    """Q-learning of layers or of a block (Baker et al., 2017; Zhong et al., 2018)."""

    type: Literal["q_learning"]
    """The method `q_learning`."""
    memory: Count | None = 2
    """Number of previous answers that make up the state of a choice; null: all of them."""
    learning_rate: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.1
    """Part of the way that a value moves to its target."""
    discount: ZeroToOne = 1.0
    """Discount of the value of the next choice."""
    exploration: ZeroToOne = 0.55
    """Part of the trials that is drawn evenly; epsilon falls from 0.9 to 0.1 over the rest."""
    replay: Count = 32
    """Evaluated networks that are replayed after each trial."""
    shaped: Flag = False
    """Give every choice an equal part of the score (BlockQNN)."""
    repeats: Positive = 50
    """Known networks drawn in a row before answers are drawn evenly, and again before the search ends."""


class Progressive(MethodSection):
    """From simple to complex cells, guided by a predictor (Liu et al., 2018)."""

    counts = ("beam",)

    type: Literal["progressive"]
    """The method `progressive`."""
    beam: Positive = 8
    """Networks that are evaluated, and then grown, at each level."""
    grow_by: Text | None = None
    """Number in the space (`nodes` of `cell`), or choice, that measures how complex a network is; null: choices are
    opened in stretches."""
    levels: Positive = 3
    """Number of stretches."""
    candidates: Positive = 1000
    """Most networks that the predictor scores at a level."""


class TreeSearch(MethodSection):
    """Monte Carlo tree search of choices (Negrinho and Gordon, 2017)."""

    type: Literal["tree_search"]
    """The method `tree_search`."""
    exploration: AtLeastZero = 0.3
    """Weight of the confidence bound: 0 always takes the option with the best mean."""
    bisection: Flag = False
    """Split the options of each choice into halves, again and again, so that neighbours share their scores."""
