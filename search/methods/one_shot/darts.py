"""The architecture as weights found by gradients (Liu et al., "DARTS: Differentiable Architecture Search", ICLR
2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.one_shot.base import OneShot
from orchestray.search.methods.one_shot.shared import check_shared
from orchestray.search.spaces.architectures.chain import Chain


class Darts(OneShot):
    """All operations at once, weighted.

    The weights of operations are trained on one part of the training data, those of the network on the other. The
    search finds one network, so there is one finalist. The program is `search.trials.one_shot.darts`.
    """

    program = "darts"
    name = "darts"

    def __init__(
        self,
        *,
        order: int = 1,
        architecture_learning_rate: float = 0.003,
        architecture_weight_decay: float = 1e-3,
        warmup_part: float = 0.2,
        **common: Any,
    ) -> None:
        """Take the parameters of `params.Darts` and the arguments of `OneShot`.

        Raises:
            ConfigError: the space does not support shared weights.
        """
        self._own = {
            "order": order,
            "architecture_learning_rate": architecture_learning_rate,
            "architecture_weight_decay": architecture_weight_decay,
            "warmup_part": warmup_part,
        }
        super().__init__(**common)

    def _check_space(self) -> None:
        check_shared(self.architecture, self.name)
        if isinstance(self.architecture, Chain):
            raise ConfigError(
                "search.architecture.space: darts weighs the operations on the edges of a cell, and a chain has "
                "none: take the space cell, or enas, which takes chains"
            )

    def _arguments(self) -> Mapping[str, Any]:
        return self._own
