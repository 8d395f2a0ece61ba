"""The messages from one data centre to another, in the order in which a slow link is to carry them.

Hsieh et al., "Gaia: Geo-Distributed Machine Learning Approaching LAN Speeds" (2017), section 5.2: a queue for control
messages, which go first, and one for values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from orchestray.trainers.ps.variants.hierarchy.significance_filter import pack

MOST_PLACES = 64
"""Most changes in a message, so that a barrier does not wait long for the message before it."""
_PLACE_BYTES = 4


@dataclass(frozen=True)
class Update:
    """Significant changes of parameters.

    Args:
        places: indices of the changed elements, int64.
        change: change at each place.
        num_bytes: bytes on the link.
    """

    places: Tensor
    change: Tensor
    num_bytes: int


@dataclass(frozen=True)
class Barrier:
    """A selective barrier: the places of changes that are significant, and have yet to be sent.

    Args:
        places: indices, int64.
        num_bytes: bytes on the link.
    """

    places: Tensor
    num_bytes: int


@dataclass(frozen=True)
class MirrorClock:
    """The number of clocks that a data centre has completed."""

    clock: int
    num_bytes: int = 8


Message: TypeAlias = Update | Barrier | MirrorClock


class Outbox:
    """The messages to one other data centre. A link carries one at a time.

    When a clock arrives there, each change that was significant by then has arrived too, or a barrier holds its place.
    """

    def __init__(self, like: Tensor, transmit: Callable[[Message], None], *, announces: bool = True) -> None:
        """
        Args:
            like: tensor with the shape and dtype of all parameters, `[elements]`.
            transmit: puts a message on the link, which is then busy until `freed` is called.
            announces: False to send no barriers.
        """
        self._transmit, self._announces = transmit, announces
        self._is_busy = False
        self._control: deque[Message] = deque()
        self._queued = torch.zeros_like(like)
        self._turn = torch.full(like.shape, -1)
        """Place in the queue of each element's change; -1: there is none."""
        self._next_turn = 0

    @property
    def waiting(self) -> Tensor:
        """Places whose changes have yet to be sent, int64, ascending."""
        return (self._turn >= 0).nonzero().flatten()

    def send_changes(self, places: Tensor, change: Tensor) -> None:
        """Send significant changes; those of a place that waits already are added up.

        They go at once if the link is free. Otherwise, and if they take several messages, a barrier goes first.

        Args:
            places: indices of the changed elements, int64, ascending.
            change: change at each place.
        """
        fresh = places[self._turn[places] < 0]
        self._queued.index_add_(0, places, change)
        self._turn[fresh] = torch.arange(self._next_turn, self._next_turn + len(fresh))
        self._next_turn += len(fresh)
        if self._announces and len(fresh) and (self._is_busy or len(fresh) > MOST_PLACES):
            # An index for each place, or a bit for each parameter.
            num_bytes = min(len(fresh) * _PLACE_BYTES, -(-len(self._turn) // 8))
            self._control.append(Barrier(fresh, num_bytes))
        self._advance()

    def send_clock(self, clock: int) -> None:
        """Send the number of clocks completed here."""
        self._control.append(MirrorClock(clock))
        self._advance()

    def freed(self) -> None:
        """Go on: the last message has left."""
        self._is_busy = False
        self._advance()

    def _advance(self) -> None:
        if self._is_busy:
            return
        message = self._control.popleft() if self._control else self._oldest_changes()
        if message is not None:
            self._is_busy = True
            self._transmit(message)

    def _oldest_changes(self) -> Update | None:
        places = self.waiting
        if not len(places):
            return None
        places = places[self._turn[places].argsort()[:MOST_PLACES]].sort().values
        change = self._queued[places]
        self._queued[places], self._turn[places] = 0, -1
        num_bytes = sum(tensor.nbytes for tensor in pack(places, change, len(self._turn)))
        return Update(places, change, num_bytes)
