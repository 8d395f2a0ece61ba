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
    """By turns the shared weights are trained on networks that a controller draws, and the controller by the reward of
    networks on data that the weights have not seen. See `search.trials.one_shot.enas`.
    """

    program = "orchestray.search.trials.one_shot.enas:EnasTrial"
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
        """
        Args:
            metric: of the task, that rewards the controller; None: what `judge_by` says, else minus the loss.
            controller_every: steps of the shared weights between two turns of the controller.
            controller_steps: updates of the controller in its turn.
            children: networks of an update of the controller.
            hidden: units of its LSTM.
            controller_learning_rate: of Adam.
            baseline_decay: of the moving average of rewards.
            entropy_weight: added reward for each nat of entropy.
            num_judged: networks drawn at the end, of which the best are the finalists.
            common: as of `OneShot` and `Method`.

        Raises:
            ConfigError: the space is no program of choices, or has no network of shared weights.
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
