"""Methods that learn what to build, as a search config names them."""

from __future__ import annotations

from typing import Literal

from orchestray.platform.config.base import Section


class Reinforce(Section):
    """A controller learns by reward what to build (Zoph and Le, 2017)."""

    type: Literal["reinforce"]
    """The method `reinforce`."""


class QLearning(Section):
    """Q-learning of layers or of a block (Baker et al., 2017; Zhong et al., 2018)."""

    type: Literal["q_learning"]
    """The method `q_learning`."""


class Progressive(Section):
    """From simple to complex cells, led by a predictor (Liu et al., 2018)."""

    type: Literal["progressive"]
    """The method `progressive`."""


class Enas(Section):
    """All candidates share one set of weights (Pham et al., 2018)."""

    type: Literal["enas"]
    """The method `enas`."""


class Darts(Section):
    """The architecture as weights found by gradients (Liu et al., 2019)."""

    type: Literal["darts"]
    """The method `darts`."""


class Smash(Section):
    """A network that writes the weights of others (Brock et al., 2018)."""

    type: Literal["smash"]
    """The method `smash`."""


ControllerMethod = Reinforce | QLearning | Progressive | Enas | Darts | Smash
