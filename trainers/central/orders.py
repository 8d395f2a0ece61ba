"""What the lead server tells a worker to do, and what it answers a report with. JSON values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Compute:
    """Compute the gradient of a share and push it."""

    order_id: int
    """Of the share, not of whoever computes it: a copy, and a share that is handed out again, keep it. Ids rise in the
    global order of the shares, over the whole run."""
    step: int
    """The batch the share is of, from 1."""
    epoch: int
    """From 0."""
    step_in_epoch: int
    """From 0."""
    share: int
    """Which of the batch's shares, from 0."""
    num_shares: int
    """Into how many the batch is cut; of a short batch some are empty, and those are never handed out."""
    pieces: tuple[tuple[int, int], ...]
    """Positions in the epoch, from and up to, of the share's part of each micro-batch; none is empty."""
    batch_samples: int
    num_samples: int
    """Of the share."""
    num_micro_batches: int
    """Of the whole batch."""
    min_version: int
    """Steps whose updates the parameters must hold at least when they are read; in a synchronous run, exactly."""
    copy: bool = False
    """Whether somebody else computes the share as well: the first answer counts."""


@dataclass(frozen=True)
class Validate:
    """Evaluate part `part` of `num_parts` of the validation data."""

    order_id: int
    step: int
    """After which it takes place."""
    part: int
    num_parts: int


@dataclass(frozen=True)
class Save:
    """Write a checkpoint: no share is under way until it is reported as saved."""

    order_id: int
    step: int


@dataclass(frozen=True)
class Deposit:
    """Give the servers a copy of what your compressors keep: a checkpoint is due."""

    order_id: int
    step: int


LEFT = "left"


@dataclass(frozen=True)
class Finish:
    """There is nothing more to do."""

    reason: str
    """`finished`, or what the stop was requested with; `left`: for this worker alone, which was dismissed."""


@dataclass(frozen=True)
class Wait:
    """Nothing to do for now; ask again when something has changed in the ledger."""

    drain: bool = False
    """The worker itself holds orders: answer it at once, so that it does and pushes those, which the others (or the
    worker's own next order) wait for. Holding back the answer would wait for ever."""


Order: TypeAlias = Compute | Validate | Save | Deposit | Finish | Wait

_ALL: tuple[type[Order], ...] = (Compute, Validate, Save, Deposit, Finish, Wait)
_KINDS: dict[str, type[Order]] = {kind.__name__.lower(): kind for kind in _ALL}
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS.values()}


def order_to_json(order: Order) -> dict[str, Any]:
    """The order as JSON values; `order_from_json` makes the same order of them."""
    return {"kind": type(order).__name__.lower(), **vars(order)}  # `asdict` copies what cannot change, and is slow


def order_from_json(value: Mapping[str, Any]) -> Order:
    """The order that `order_to_json` told."""
    kind = _KINDS[value["kind"]]
    values = {name: value[name] for name in _FIELDS[kind]}
    if kind is Compute:
        values["pieces"] = tuple((int(start), int(stop)) for start, stop in values["pieces"])
    return kind(**values)


def compute_to_row(order: Compute) -> list[Any]:
    """A share's order as JSON values without their names, of which a message may hold many."""
    return list(vars(order).values())


def compute_from_row(row: Sequence[Any]) -> Compute:
    """The order that `compute_to_row` told."""
    values = dict(zip(_FIELDS[Compute], row, strict=True))
    values["pieces"] = tuple((int(start), int(stop)) for start, stop in values["pieces"])
    return Compute(**values)


@dataclass(frozen=True)
class DoneStep:
    """A step that is complete: batch_size more samples are applied."""

    step: int
    epoch: int
    """From 0."""
    loss: float
    """Mean over its samples, each as its worker saw it."""
    batch_samples: int
    staleness: int
    """The largest of the pushes in it."""


@dataclass(frozen=True)
class Ack:
    """What an acknowledgement led to."""

    counts: bool
    """Whether the push was the share's one: False where it had been claimed by, or given to, somebody else."""
    done_steps: tuple[DoneStep, ...] = ()
    """Complete by it, in order."""
    dropped: tuple[int, ...] = ()
    """Workers that were computing the same share, and need not go on."""
