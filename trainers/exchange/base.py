"""How replicas agree on the parameters: one small interface, one file per scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from orchestray.platform.collective import Collective
from orchestray.trainers.layout.pieces import Piece

MAX_EXTRAS = 8
"""How many numbers may ride along with the gradients of a step."""


class Update(NamedTuple):
    """A tensor this worker's optimizer changes: a parameter, or the shard of one."""

    name: str
    """The parameter's, in the model."""
    tensor: Tensor
    """Its memory; stays the same while the exchange is attached."""
    piece: Piece
    """Where it lies in the plain parameter."""


class Held(NamedTuple):
    """A tensor of the model's state as this worker holds it between steps."""

    tensor: Tensor
    piece: Piece


class Exchange(Protocol):
    """What the replica's loop calls, once a step.

    `before_step`; then for each micro-batch of this replica's share (there may be none) `begin_backward` and
    `(loss * num_samples / batch_samples).backward()`; then `finish`, the update of every tensor of `updates` by its
    gradient in `gradients`, and `after_step`.
    """

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None = None) -> None:
        """Take part with `model`, whose parameters and their order are the same on every replica. All replicas call it.

        May be called again with the collective of a new generation, after a peer was lost.

        Args:
            model: what this worker holds; a scheme that shards parameters changes how they are stored.
            collective: the workers that hold the same part of the model.
            pieces: where each tensor of `model` lies in the plain model; default: each is whole.
        """

    def updates(self) -> list[Update]:
        """What this worker's optimizer is to change, in a fixed order."""

    def gradients(self) -> list[Tensor | None]:
        """After `finish`: the gradient of each tensor of `updates`; None for a parameter that no replica used."""

    def held(self) -> dict[str, Held]:
        """The model's parameters and persistent buffers as this worker holds them between steps, by name."""

    def detach(self) -> None:
        """Let go of the model and the collective; what was under way is given up."""

    def before_step(self, step: int) -> None:
        """Clear the gradients; `step` counts from 1."""

    def begin_backward(self, last_micro_batch: bool) -> None:
        """A backward pass comes next; after the one of the share's last micro-batch the gradients are whole."""

    def finish(self, extras: Sequence[float]) -> list[float]:
        """Wait until every `.grad` is what the scheme updates from.

        Args:
            extras: up to `MAX_EXTRAS` numbers, as many on every replica.

        Returns:
            The sum of each extra over the replicas, the same bits on every replica.

        Raises:
            PeerLostError: another replica is gone; the step is lost. `detach`, or `attach` to a new collective.
        """

    def rest(self) -> None:
        """No more forward passes come until the next step, or for now: called after those of a validation, before any
        other collective operation. A scheme that gathers parameters during a pass serves the other replicas' here.

        Raises:
            PeerLostError: another replica is gone.
        """

    def after_step(self, step: int) -> None:
        """The parameters have been updated."""

    def state(self) -> dict[str, Held]:
        """What this replica alone keeps beside model and optimizer, and a checkpoint must hold for the scheme to go on
        exactly, by names of the scheme's own.
        """

    def wanted(self) -> dict[str, Piece]:
        """What `load_state` is to be given of what `state` returned: names and pieces."""

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what was saved of `state`. Not called where another scheme, or another number of replicas, saved:
        the scheme then begins anew.
        """

    def report(self) -> dict[str, float]:
        """What the metric line of the last step says of the scheme."""

    def told(self) -> dict[str, Any]:
        """What the run's result says of the scheme: JSON values."""

    @property
    def bytes_sent(self) -> int:
        """What this replica has sent in this step (the last one, between steps)."""

    @property
    def bytes_sent_total(self) -> int:
        """What it has sent since the exchange was made."""

    @property
    def bytes_dense_total(self) -> int:
        """What it would have sent had nothing been compressed."""
