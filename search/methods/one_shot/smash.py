"""A network that writes the weights of others (Brock et al., "SMASH: One-Shot Model Architecture Search through
HyperNetworks", ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.search.methods.one_shot.base import OneShot, reward_of


class Smash(OneShot):
    """A network is trained that maps an architecture to its weights, on architectures drawn from the space; then many
    are ranked with weights it writes, and the best trained by themselves. Works with any space, a user's own, too.
    See `search.trials.one_shot.smash`.
    """

    program = "orchestray.search.trials.one_shot.smash:SmashTrial"
    name = "smash"

    def __init__(self, *, hidden: int = 64, num_judged: int = 64, metric: str | None = None, **common: Any) -> None:
        """
        Args:
            hidden: units of the network that writes.
            num_judged: networks drawn at the end, of which the best by written weights are the finalists.
            metric: of the task, that they are judged by; None: what `judge_by` says, else minus the loss.
            common: as of `OneShot` and `Method`.
        """
        self._own: dict[str, Any] = {"hidden": hidden, "num_judged": num_judged, "metric": metric}
        super().__init__(**common)

    def judge_by(self, metric: str, mode: str) -> None:
        self._own |= reward_of(self._own["metric"], metric, mode)

    def _arguments(self) -> Mapping[str, Any]:
        return self._own
