"""A network that writes the weights of others (Brock et al., "SMASH: One-Shot Model Architecture Search through
HyperNetworks", ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.search.methods.one_shot.base import OneShot, reward_of


class Smash(OneShot):
    """A hypernetwork, trained on random architectures of the space, that writes the weights of an architecture.

    Many architectures are then ranked with written weights, and the best are trained separately. It works with any
    space, including a user's own. The program is `search.trials.one_shot.smash`.
    """

    program = "smash"
    name = "smash"

    def __init__(self, *, hidden: int = 64, num_judged: int = 64, metric: str | None = None, **common: Any) -> None:
        """Take the parameters of `params.Smash` and the arguments of `OneShot`."""
        self._own: dict[str, Any] = {"hidden": hidden, "num_judged": num_judged, "metric": metric}
        super().__init__(**common)

    def judge_by(self, metric: str, mode: str) -> None:
        self._own |= reward_of(self._own["metric"], metric, mode)

    def _arguments(self) -> Mapping[str, Any]:
        return self._own
