"""The interface between the replica's loop and a model, one for all layouts. Each layout has a file of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from orchestray.platform.data.stream import Share
    from orchestray.trainers.core.exchange import Exchange, OptimizedTensor
    from orchestray.trainers.layout.tensor_slice import TensorSlice


@dataclass
class Usage:
    """A worker's use of its time and its links since the last query."""

    busy_s: float = 0.0
    """Seconds spent in actions of the schedule."""
    span_s: float = 0.0
    """Seconds from the first action to the last one of any worker of this copy, summed over the steps."""
    bytes_by_link: dict[str, int] = field(default_factory=dict)
    """Bytes sent to other workers of this copy, by link: "stage 0 -> stage 1", "tensor"."""
    timeline: list[dict[str, Any]] = field(default_factory=list)
    """Actions of the last steps: step, action, begin_s, end_s (wall clock)."""


class Network(Protocol):
    """A worker's part of the model, assembled for one generation of the gang.

    All workers of a copy call the same methods with the same share, in the same order.
    """

    model: nn.Module
    """The part of the model on this worker; its names are the plain model's."""
    pieces: Mapping[str, TensorSlice]
    """Position of each parameter and buffer of `model` in the plain one, by its name in `model`."""
    partial: frozenset[str]
    """Names of the parameters of which each worker of the tensor group computes a part of the gradient."""
    is_reporting: bool
    """True if this worker's loss and metrics count: those of one worker of each copy do."""
    streams: bool
    """True if it trains by a schedule of its own on a stream of batches (`run_segment` of PipeDream)."""
    combines: bool
    """True if `combine` is to be called."""

    def backward(self, share: Share, exchange: Exchange, *, step: int) -> float | Tensor:
        """Run forward and backward of a share; afterwards every `.grad` is this copy's part of the gradient.

        `exchange.begin_backward` is called before each backward pass. The loss of each micro-batch is weighted by its
        part of the batch (its weight by `Share.batch_weight`).

        Returns:
            The share's part of the batch's mean loss; 0 if this worker does not know the loss. A device's number may be
                a tensor of one element, in double precision, which waits there to be read.

        Raises:
            PeerLostError: another worker of the copy is gone.
            TrainingError: the loss is not a finite scalar, or the user's code failed.
        """

    def refuse_losses(self, step: int) -> None:
        """Look at the losses of a step of which `backward` has returned a tensor that is not finite.

        Raises:
            TrainingError: one of them is not finite.
        """

    def combine(self, updates: Sequence[OptimizedTensor], gradients: Sequence[Tensor | None]) -> None:
        """Sum, in place, gradients of which each worker of the copy has computed a part.

        Called after the exchange. `gradients` are those of `updates`, in the same order.
        """

    def evaluate(self, share: Share, *, loss_only: bool = False) -> dict[str, Any]:
        """Return loss and metrics of a share, added up (`task_calls.add`); empty if this worker does not know them.

        The model must be in evaluation mode, and gradients disabled.

        Args:
            share: the share.
            loss_only: leave out the task's metrics, which may not take batches to train on.
        """

    def usage(self) -> Usage | None:
        """Return this worker's usage since the last call; None if it holds the whole model."""

    def close(self) -> None:
        """Remove hooks and close channels; another network may be assembled afterwards."""
