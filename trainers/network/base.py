"""What the replica's loop needs of a model, however it is laid out: one interface, one file per way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from orchestray.platform.data.stream import Share
    from orchestray.trainers.exchange.base import Exchange, Update
    from orchestray.trainers.layout.pieces import Piece


@dataclass
class Usage:
    """What a worker did with its time and its links since it was asked last."""

    busy_s: float = 0.0
    """Seconds computing (in an action of the schedule)."""
    span_s: float = 0.0
    """Seconds from the first action of each step to the last of any worker of this copy, added up."""
    bytes_by_link: dict[str, int] = field(default_factory=dict)
    """Bytes sent to other workers of this copy, by link: "stage 0 -> stage 1", "tensor"."""
    timeline: list[dict[str, Any]] = field(default_factory=list)
    """The actions of the last steps: step, action, begin_s, end_s (wall clock)."""


class Network(Protocol):
    """A worker's part of the model, assembled for one generation of the gang.

    All workers of one copy call the same methods with the same share, in the same order.
    """

    model: nn.Module
    """What this worker holds. Names are the plain model's."""
    pieces: Mapping[str, Piece]
    """Where each parameter and persistent buffer of `model` lies in the plain one, by its name in `model`."""
    is_reporting: bool
    """Whether this worker's loss and metrics count: those of one worker of each copy do."""

    def backward(self, share: Share, exchange: Exchange, *, step: int) -> float:
        """Forward and backward of a share; afterwards every `.grad` is this copy's part of the gradient.

        `exchange.begin_backward` is called before each backward pass. Each micro-batch's loss weighs num_samples /
        batch_samples.

        Returns:
            The share's part of the batch's mean loss; 0 where the loss is not known.

        Raises:
            PeerLostError: another worker of the copy is gone.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """

    def combine(self, updates: Sequence[Update], gradients: Sequence[Tensor | None]) -> None:
        """Add up, in place, gradients of which each worker of the copy has computed a part.

        Called after the exchange; `gradients` are those of `updates`, in their order.
        """

    def evaluate(self, share: Share) -> dict[str, float]:
        """Loss and metrics of a share, each summed over its samples; empty where they are not known.

        The model must be in evaluation mode, and gradients off.
        """

    def usage(self) -> Usage:
        """What this worker did since the last call."""

    def close(self) -> None:
        """Let go of hooks and channels; another network may be assembled after."""
