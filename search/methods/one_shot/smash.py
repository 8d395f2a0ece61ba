"""A network that generates the weights of others (Brock et al., "SMASH: One-Shot Model Architecture Search through
HyperNetworks", ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.one_shot.base import OneShot, reward_of
from orchestray.search.spaces.architectures.memory_bank import MemoryBank
from orchestray.search.spaces.registry import OwnSpace


class Smash(OneShot):
    """A HyperNet, trained on random architectures of the space, that generates the weights of an architecture.

    Many architectures are then ranked with generated weights, and the best of them is perturbed. The best of all are
    trained from weights of their own. The program is `search.trials.one_shot.smash`.
    """

    program = "smash"
    name = "smash"

    def __init__(
        self,
        *,
        hidden: int = 32,
        num_judged: int = 64,
        num_perturbed: int = 32,
        metric: str | None = None,
        **common: Any,
    ) -> None:
        """Take the parameters of `params.Smash` and the arguments of `OneShot`.

        Raises:
            ConfigError: the space is not one of memory banks.
        """
        self._own: dict[str, Any] = {
            "hidden": hidden,
            "num_judged": num_judged,
            "num_perturbed": num_perturbed,
            "metric": metric,
        }
        super().__init__(**common)

    def _check_space(self) -> None:
        own = self.architecture.space if isinstance(self.architecture, OwnSpace) else self.architecture
        if not isinstance(own, MemoryBank):
            raise ConfigError(
                "search.architecture.space: the HyperNet of smash generates weights from codes of memory banks, and "
                f"{type(own).__name__} has none. Take the space memory_bank, or another method: enas and "
                "darts share the weights of the space cell, regularized_evolution takes any space"
            )

    def judge_by(self, metric: str, mode: str) -> None:
        self._own |= reward_of(self._own["metric"], metric, mode)

    def _arguments(self) -> Mapping[str, Any]:
        return self._own
