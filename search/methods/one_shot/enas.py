"""All candidates share one set of weights (Pham et al., "Efficient Neural Architecture Search via Parameter Sharing",
ICML 2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.search.methods.controllers.answering import choice_space
from orchestray.search.methods.one_shot.base import OneShot, reward_of
from orchestray.search.methods.one_shot.shared import check_shared


class Enas(OneShot):
    """Alternating training of the shared weights and of a controller.

    The weights are trained on networks that the controller draws; the controller is trained by the reward of networks
    on data that the weights have not seen. The program is `search.trials.one_shot.enas`.
    """

    program = "enas"
    name = "enas"

    def __init__(
        self,
        *,
        metric: str | None = None,
        controller_every: int = 10,
        controller_steps: int = 5,
        children: int = 4,
        hidden: int = 64,
        controller_learning_rate: float = 0.003,
        baseline_decay: float = 0.95,
        entropy_weight: float = 1e-3,
        num_judged: int = 32,
        **common: Any,
    ) -> None:
        """Take the parameters of `params.Enas` and the arguments of `OneShot`.

        Raises:
            ConfigError: the space is not a program of choices, or does not support shared weights.
        """
        self._own: dict[str, Any] = {
            "metric": metric,
            "controller_every": controller_every,
            "controller_steps": controller_steps,
            "children": children,
            "hidden": hidden,
            "controller_learning_rate": controller_learning_rate,
            "baseline_decay": baseline_decay,
            "entropy_weight": entropy_weight,
            "num_judged": num_judged,
        }
        super().__init__(**common)

    def _check_space(self) -> None:
        choice_space(self.architecture, self.name)
        check_shared(self.architecture, self.name)

    def judge_by(self, metric: str, mode: str) -> None:
        self._own |= reward_of(self._own["metric"], metric, mode)

    def _arguments(self) -> Mapping[str, Any]:
        return self._own
