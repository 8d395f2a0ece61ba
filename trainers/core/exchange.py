"""The interface of exchanges, by which replicas agree on the parameters. Each scheme has a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.layout.tensor_slice import TensorSlice

MAX_EXTRAS = 8
"""Largest number of scalars that a step may sum along with its gradients."""


class OptimizedTensor(NamedTuple):
    """A tensor that this worker's optimizer updates: a parameter or a shard of one."""

    name: str
    """Name of the parameter in the model."""
    tensor: Tensor
    """Memory that the optimizer updates; the same tensor while the exchange is attached."""
    piece: TensorSlice
    """Position of the tensor in the plain parameter."""


class LocalTensor(NamedTuple):
    """A tensor of the model's state as this worker holds it between steps."""

    tensor: Tensor
    piece: TensorSlice


class Exchange(Protocol):
    """The interface through which the replica's loop synchronizes parameters, once a step.

    The loop calls `before_step`. For each micro-batch of this replica's share (there may be none) it calls
    `begin_backward` and `(loss * num_samples / batch_samples).backward()`. Then it calls `finish`, updates every tensor
    of `updates` by its gradient in `gradients`, and calls `after_step`.
    """

    diverges: bool
    """True if each replica updates its own parameters: `finish` sums nothing, and losses are exchanged now and then."""
    shares_batch: bool
    """True if the replicas share each batch; False if each has its own batches."""
    shared_names: Collection[str]
    """Names of parameters that replicas with models of their own share."""
    samples_after: Callable[[int], int]
    """Returns the samples of all replicas in the first steps, given their number; the loop sets it."""
    fraction: float
    """Part of the step's samples that this replica has computed; the loop sets it before `finish`."""
    step_metrics: dict[str, float]
    """The scheme's entries in the metric line of the last step, once `after_step` has returned."""
    bytes_beyond: int
    """Bytes that all replicas sent in this step beyond their number times what this one sent."""
    bytes_saved: int
    """Bytes that compression has kept this replica from sending since the exchange was created."""
    asked_bytes: int
    """Bytes sent, both ways, over connections of the scheme's own because of this replica's requests."""

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        """Synchronize `model`, whose parameters and their order are the same on every replica. All replicas call this.

        May be called again with the collective of a new generation, after a peer was lost.

        Args:
            model: the part of the model on this worker; a scheme that shards parameters changes how they are stored.
            collective: the workers that hold the same part of the model.
            pieces: position of each tensor of `model` in the plain model; default: each is whole.
        """

    def updates(self) -> list[OptimizedTensor]:
        """Return the tensors that this worker's optimizer updates, in a fixed order."""

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of each tensor of `updates`, or None for a parameter that no replica used.

        Valid after `finish`.
        """

    def held(self) -> dict[str, LocalTensor]:
        """Return the model's parameters and persistent buffers as this worker holds them between steps, by name."""

    def detach(self) -> None:
        """Release the model and the collective, and abandon operations in progress."""

    def before_step(self, step: int) -> None:
        """Clear the gradients; `step` counts from 1."""

    def begin_backward(self, last_micro_batch: bool) -> None:
        """Prepare for the next backward pass.

        Args:
            last_micro_batch: True if the gradients are complete after this pass, because it is the share's last.
        """

    def finish(self, extras: Sequence[float | Tensor]) -> list[float]:
        """Wait until every `.grad` holds the gradient that the scheme updates from.

        Args:
            extras: up to `MAX_EXTRAS` scalars; every replica passes the same number of them. One that is on a device is
                not read before it is sent.

        Returns:
            The sum of each extra over the replicas, bitwise equal on every replica; this replica's own extras if the
            scheme `diverges`.

        Raises:
            PeerLostError: another replica is gone; the step is lost. Call `detach`, or `attach` with a new collective.
        """

    def rest(self) -> None:
        """Announce that no more forward passes come until the next step.

        The loop calls this after the passes of a validation, before any other collective operation. A scheme that
        gathers parameters during a pass serves the other replicas' gathers here.

        Raises:
            PeerLostError: another replica is gone.
        """

    def after_step(self, step: int) -> None:
        """Finish the step after the parameters were updated."""

    def own(self) -> dict[str, LocalTensor]:
        """Return the tensors of `held`, counted by every replica; empty if all replicas have the same ones."""

    def consensus(self) -> AbstractContextManager[None]:
        """Replace the model, inside the context, by what the replicas agree on. All of them call this."""

    def agree(self) -> None:
        """Take what the replicas agree on permanently, as at the end of the training. All of them call this."""

    def state(self) -> dict[str, LocalTensor]:
        """Return the state of the scheme that only this replica has, besides model and optimizer.

        A checkpoint must hold it so that the scheme resumes exactly. The scheme chooses the names.
        """

    def wanted(self) -> dict[str, TensorSlice]:
        """Return the names and pieces of the saved `state` that `load_state` needs on this worker."""

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Resume from the saved `state`.

        Not called if another scheme or another number of replicas saved it: the scheme then starts from scratch.
        """

    def summary(self) -> dict[str, Any]:
        """Return the scheme's entries in the run's result, as JSON values."""
