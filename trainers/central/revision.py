"""A server's rate apart from its workers': the changes that workers make of the same version count as their mean.

Jiang, Cui, Zhang and Yu, "Heterogeneity-aware Distributed Parameter Servers" (SIGMOD 2017), section 5 (DynSGD): workers
make steps of their own at a local rate and push how far they have come; the server moves the parameters by that times a
global rate, which is 1/d, d being the workers that have pushed a change of the same version, and revises what it did
with the earlier ones when another comes in. The version of the parameters goes up with the first change of the newest,
so it counts the rounds of the fastest worker. A change that comes rounds later then does not add to what the others did
meanwhile: it only corrects, by a part, the round that it belongs to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NUM_ROUNDS = 16
"""So many rounds can be revised, each for one more copy of the shard; what is of an older one counts for the oldest."""
_KEY = "revision/"


@dataclass
class _Round:
    """The changes that were made of parameters from one version on, up to the next round's."""

    begin: int
    num_changes: int = 0
    mean: Tensor | None = None
    """Of the changes; None before the first."""


class Revision:
    """What a shard remembers of its last rounds."""

    def __init__(self, version: int = 0, global_lr: float = 1.0) -> None:
        """
        Args:
            version: of the shard as it is.
            global_lr: what a round's mean is multiplied by.
        """
        self.global_lr = global_lr
        self._rounds = [_Round(version)]

    @torch.no_grad()
    def revise(self, change: Tensor, read_version: int, version: int) -> Tensor:
        """Take a change into its round.

        Args:
            change: of a worker, `[elements]`; not kept, not changed.
            read_version: the shard's version that it was made of.
            version: of the shard, before this change.

        Returns:
            What the parameters are to be moved by, `[elements]`: all changes of a round have moved them by their mean.
        """
        index = max(0, bisect_right([one.begin for one in self._rounds], read_version) - 1)
        mine = self._rounds[index]
        if mine is self._rounds[-1]:
            self._rounds.append(_Round(version + 1))
            del self._rounds[:-NUM_ROUNDS]
        mine.num_changes += 1
        if mine.mean is None:
            mine.mean = change.clone()
            return change * self.global_lr
        moved = (change - mine.mean) / mine.num_changes
        mine.mean += moved
        return moved * self.global_lr

    def state(self) -> tuple[list[list[int]], dict[str, Tensor]]:
        """All that a copy needs: JSON, and tensors that are its own memory."""
        told = [[one.begin, one.num_changes] for one in self._rounds]
        return told, {f"{_KEY}{one.begin}": one.mean for one in self._rounds if one.mean is not None}

    def load_state(self, told: list[list[int]], tensors: Mapping[str, Any]) -> None:
        """Go on from a copy of what `state` returned."""
        self._rounds = [_Round(begin, number, _copy(tensors.get(f"{_KEY}{begin}"))) for begin, number in told]


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
