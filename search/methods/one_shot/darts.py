"""The architecture as weights found by gradients (Liu et al., "DARTS: Differentiable Architecture Search", ICLR
2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.one_shot.base import OneShot
from orchestray.search.methods.one_shot.shared import check_shared
from orchestray.search.spaces.chain import Chain


class Darts(OneShot):
    """All operations at once, weighted: the weights of operations by the loss on one part of the training data, those
    of the network by the loss on the other. See `search.trials.one_shot.darts`.

    It finds one network, so there is one finalist.
    """

    program = "orchestray.search.trials.one_shot.darts:DartsTrial"
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
        """
        Args:
            order: 2: the architecture's gradient looks a step of the weights ahead; 1: it takes them as they are.
            architecture_learning_rate: of Adam.
            architecture_weight_decay: of Adam.
            warmup_part: part of the steps in which only the weights are trained.
            common: as of `OneShot` and `Method`.

        Raises:
            ConfigError: the space has no network of shared weights.
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
