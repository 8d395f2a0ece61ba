"""A global learning rate of the server, in which the changes that workers make to the same version count as their mean.

Jiang, Cui, Zhang and Yu, "Heterogeneity-aware Distributed Parameter Servers" (SIGMOD 2017), section 5 (DynSGD): workers
make steps of their own at a local rate and push the change that these made. The server moves the parameters by that
change times a global rate of 1/d, where d workers have pushed a change to the same version. When another worker pushes
one, the server revises the moves of the earlier ones. The version of the parameters rises with the first change to the
newest version, so it counts the rounds of the fastest worker. A change that arrives rounds later does not add to the
changes made meanwhile: it only corrects, in part, the round that it belongs to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NUM_ROUNDS = 16
"""Number of rounds that can be revised; each costs a copy of the shard. Older changes count for the oldest round."""
_KEY = "revision/"


@dataclass
class _Round:
    """The changes made to parameters of one version or later, up to the next round's version."""

    begin: int
    num_changes: int = 0
    mean: Tensor | None = None
    """Mean of the changes; None before the first."""


class Revision:
    """The last rounds of a shard."""

    def __init__(self, version: int = 0, global_lr: float = 1.0) -> None:
        """
        Args:
            version: present version of the shard.
            global_lr: factor by which a round's mean is multiplied.
        """
        self.global_lr = global_lr
        self._rounds = [_Round(version)]
        self._num_changes = self._num_revised = 0

    def run_report(self) -> dict[str, int]:
        """Return the number of `changes`, and of those that `revised` a round; empty before the first one."""
        return {"changes": self._num_changes, "revised": self._num_revised} if self._num_changes else {}

    @torch.no_grad()
    def revise(self, change: Tensor, read_version: int, version: int) -> Tensor:
        """Add a change to its round.

        Args:
            change: change that a worker made, `[elements]`; neither kept nor altered.
            read_version: version of the shard to which the change was made.
            version: version of the shard before this change.

        Returns:
            The move of the parameters, `[elements]`. All changes of a round together then move them by their mean.
        """
        index = max(0, bisect_right([one.begin for one in self._rounds], read_version) - 1)
        mine = self._rounds[index]
        if mine is self._rounds[-1]:
            self._rounds.append(_Round(version + 1))
            del self._rounds[:-NUM_ROUNDS]
        mine.num_changes += 1
        self._num_changes += 1
        if mine.mean is None:
            mine.mean = change.clone()
            return change * self.global_lr
        self._num_revised += 1
        moved = (change - mine.mean) / mine.num_changes
        mine.mean += moved
        return moved * self.global_lr

    def state(self) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Return all that a copy needs: JSON values, and tensors that are this object's own memory."""
        rounds = [[one.begin, one.num_changes] for one in self._rounds]
        return rounds, {f"{_KEY}{one.begin}": one.mean for one in self._rounds if one.mean is not None}

    def load_state(self, rounds: list[list[int]], tensors: Mapping[str, Any]) -> None:
        """Continue from a copy of what `state` returned."""
        self._rounds = [_Round(begin, number, _copy(tensors.get(f"{_KEY}{begin}"))) for begin, number in rounds]


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
