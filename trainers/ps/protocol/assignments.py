"""The orders that the lead server gives workers, and the answers to their reports. JSON values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Compute:
    """Compute the gradient of a share and push it."""

    order_id: int
    """Id of the share, which a copy and a share that is handed out again keep. Ids rise in the global order of the
    shares, over the whole run.
    """
    step: int
    """Batch of the share, from 1."""
    epoch: int
    """Number of the epoch, from 0."""
    step_in_epoch: int
    """Number of the step in its epoch, from 0."""
    share: int
    """Index of the share in its batch, from 0."""
    num_shares: int
    """Number of shares that the batch is cut into. Some shares of a short batch are empty, and are never handed out."""
    pieces: tuple[tuple[int, int], ...]
    """Positions in the epoch, from and up to, of the share's part of each micro-batch; none is empty."""
    batch_samples: int
    num_samples: int
    """Number of samples of the share."""
    num_micro_batches: int
    """Number of micro-batches of the whole batch."""
    min_version: int
    """Number of steps whose updates the parameters must at least hold when they are read; in a synchronous run,
    exactly.
    """
    copy: bool = False
    """True if another worker computes the share as well; the first answer counts."""


@dataclass(frozen=True)
class Validate:
    """Evaluate part `part` of `num_parts` of the validation data."""

    order_id: int
    step: int
    """Step after which it takes place."""
    part: int
    num_parts: int


@dataclass(frozen=True)
class Save:
    """Write a checkpoint; no share is in progress until it is reported as saved."""

    order_id: int
    step: int


@dataclass(frozen=True)
class Deposit:
    """Give the servers a copy of your compressors' state, because a checkpoint is due."""

    order_id: int
    step: int


LEFT = "left"


@dataclass(frozen=True)
class Finish:
    """End; there is nothing more to do."""

    reason: str
    """Reason: `finished`, that of the request to stop, or `left` for a single worker that was dismissed."""


@dataclass(frozen=True)
class Wait:
    """Wait, and ask again when the coordinator's state has changed."""

    drain: bool = False
    """True if the worker itself holds orders. Answer it at once, so that it computes and pushes those: the others, or
    its own next order, wait for them. Holding the answer back would be a deadlock.
    """


Order: TypeAlias = Compute | Validate | Save | Deposit | Finish | Wait

_ALL: tuple[type[Order], ...] = (Compute, Validate, Save, Deposit, Finish, Wait)
_KINDS: dict[str, type[Order]] = {kind.__name__.lower(): kind for kind in _ALL}
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS.values()}


def order_to_json(order: Order) -> dict[str, Any]:
    """Return the order as JSON values, from which `order_from_json` makes the same order."""
    return {"kind": type(order).__name__.lower(), **vars(order)}  # `asdict` copies immutable values, and is slow


def order_from_json(value: Mapping[str, Any]) -> Order:
    """Return the order that `order_to_json` described."""
    kind = _KINDS[value["kind"]]
    values = {name: value[name] for name in _FIELDS[kind]}
    if kind is Compute:
        values["pieces"] = tuple((int(start), int(stop)) for start, stop in values["pieces"])
    return kind(**values)


@dataclass(frozen=True)
class DoneStep:
    """A complete step: batch_size more samples are applied."""

    step: int
    epoch: int
    """Number of the epoch, from 0."""
    loss: float
    """Mean loss over its samples, each as computed by its worker."""
    batch_samples: int
    staleness: int
    """Largest staleness of its pushes."""


@dataclass(frozen=True)
class Ack:
    """The result of an acknowledgement."""

    counts: bool
    """True if this push is the one of the share; False if another worker has claimed the share or was given it."""
    done_steps: tuple[DoneStep, ...] = ()
    """Steps that it completes, in order."""
    dropped: tuple[int, ...] = ()
    """Workers that were computing the same share and need not continue."""
