"""Saving and loading a run whose state is spread over its workers, in the plain model's own layout.

A checkpoint looks the same whatever made it. Rank 0 writes it; the workers send it their pieces one tensor after the
other. Up to `GATHER_LIMIT_BYTES` they are brought together in memory and written beside the training; a larger state is
written as it comes, and needs no more memory than its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.checkpoint_files import EXCHANGE_FILE, MODEL_FILE, OPTIMIZER_FILE
from orchestray.platform.run.tensor_file import TensorLayout
from orchestray.trainers.consolidation.members import saved_name
from orchestray.trainers.exchange.base import Held
from orchestray.trainers.exchange.holdings import wanted_slots
from orchestray.trainers.layout.pieces import Piece
from orchestray.trainers.layout.transfer import Described, Entry, describe, gather, scatter
from orchestray.trainers.replica import agreement

if TYPE_CHECKING:
    from orchestray.platform.collective import Collective
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.trainers.exchange.base import Exchange
    from orchestray.trainers.optimizers import Optimizer

GATHER_LIMIT_BYTES = 1 << 30
"""Of the model and the optimizer's state together."""

Source = tuple[Described, Iterable[Tensor]]
"""Names, dtypes and shapes of tensors, and the tensors in that order."""


@dataclass(frozen=True)
class Streams:
    """A checkpoint, one tensor at a time."""

    model: Source
    optimizer: Source
    exchange: Source | None
    """What the replicas kept for themselves; None: nothing."""
    state: Mapping[str, Any]


def save(
    world: Collective,
    writer: CheckpointWriter | None,
    step: int,
    model: Mapping[str, Held],
    optimizer: Mapping[str, Held],
    state: Mapping[str, Any],
    *,
    exchange: Mapping[str, Held] | None = None,
    consensus: Callable[[], AbstractContextManager[None]] = nullcontext,
    limit_bytes: int = GATHER_LIMIT_BYTES,
) -> None:
    """Save a checkpoint. All workers call, with what each holds.

    Args:
        world: all workers.
        writer: given on rank 0.
        step: steps done.
        model: the plain model.
        optimizer: the optimizer's state.
        state: JSON values.
        exchange: what each replica keeps for itself.
        consensus: within it `model` holds what the replicas agree on.
        limit_bytes: up to so much is brought together in memory.
    """
    parts = {MODEL_FILE: model, OPTIMIZER_FILE: optimizer}
    if exchange is not None:
        parts[EXCHANGE_FILE] = exchange
    tables = {file: _in_file_order(describe(world, held)) for file, held in parts.items()}
    total = sum(entry.num_bytes for table in tables.values() for entry in table.values())
    if total <= limit_bytes:
        with consensus():
            brought = {MODEL_FILE: bring_together(world, model, tables[MODEL_FILE])}
        brought |= {
            file: bring_together(world, held, tables[file]) for file, held in parts.items() if file != MODEL_FILE
        }
        if writer is not None:
            exchanged = brought.get(EXCHANGE_FILE)
            writer.save_async(step, brought[MODEL_FILE], brought[OPTIMIZER_FILE], state, exchange=exchanged)
        return
    producers = {
        file: _producer(world, tables[file], held, consensus if file == MODEL_FILE else nullcontext)
        for file, held in parts.items()
    }
    if writer is not None:
        writer.save_streamed(step, {file: (_layout(tables[file]), producers[file]) for file in parts}, state)
    else:
        for produce in producers.values():
            produce(_nowhere)


def bring_together(
    world: Collective, held: Mapping[str, Held], table: Mapping[str, Entry] | None = None
) -> dict[str, Tensor]:
    """The plain tensors on rank 0, nothing elsewhere. All workers call."""
    brought: dict[str, Tensor] = {}

    def place(name: str, entry: Entry) -> Tensor:
        brought[name] = torch.empty(entry.shape, dtype=entry.dtype)
        return brought[name]

    gather(world, describe(world, held) if table is None else table, held, place)
    return brought


def load(
    world: Collective,
    found: Streams | None,
    exchange: Exchange,
    optimizer: Optimizer,
    *,
    num_members: int = 0,
    shared: Collection[str] = (),
) -> Mapping[str, Any] | None:
    """Load model and optimizer of a checkpoint that rank 0 has found, if it has. All workers call; each keeps its
    pieces. Where another number of members has saved, see `members.saved_name`.

    Args:
        world: all workers.
        found: on rank 0: the checkpoint.
        exchange: holds the model.
        optimizer: its slots are filled.
        num_members: of the ensemble that is trained; 0: a plain model is.
        shared: names, in the plain model, of what the members of an ensemble have in common.

    Returns:
        The checkpoint's state, on every rank; None if there is none.

    Raises:
        CheckpointError: it does not fit, or is damaged.
    """
    state = agreement.share_json(world, None if found is None else dict(found.state), 0)
    if state is None:
        return None

    def saved(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        there = int(state.get("members", 0))
        return {
            key: replace(piece, name=saved_name(piece.name, there, num_members, shared))
            for key, piece in pieces.items()
        }

    held = exchange.held()
    seen = set()
    wanted = saved({key: item.piece for key, item in held.items()})
    for name, tensor in scatter(world, None if found is None else found.model, wanted):
        held[name].tensor.detach().copy_(tensor)
        seen.add(name)
    if missing := sorted(set(held) - seen):
        raise CheckpointError(f"The saved weights do not fit the model; missing: {', '.join(missing[:5])}.")
    wanted = saved(wanted_slots(optimizer, exchange.updates()))
    slots = dict(scatter(world, None if found is None else found.optimizer, wanted))
    optimizer.load_state_tensors(slots)
    return dict(state)


def load_own(world: Collective, source: Source | None, wanted: Mapping[str, Piece]) -> dict[str, Tensor]:
    """What this replica kept for itself in the checkpoint that rank 0 has found. All workers call.

    Raises:
        CheckpointError: something is missing, or does not fit.
    """
    loaded = dict(scatter(world, source, wanted))
    if missing := sorted(name for name, piece in wanted.items() if name not in loaded and piece.shape):
        raise CheckpointError(f"The saved state of the exchange lacks {', '.join(missing[:5])}.")
    return loaded


def _in_file_order(table: Mapping[str, Entry]) -> dict[str, Entry]:
    return {name: table[name] for name in _layout(table).slots}


def _layout(table: Mapping[str, Entry]) -> TensorLayout:
    return TensorLayout.of(
        {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in table.items()}
    )


def _producer(
    world: Collective,
    table: Mapping[str, Entry],
    held: Mapping[str, Held],
    within: Callable[[], AbstractContextManager[None]],
) -> Callable[[Callable[[str, Tensor], None]], None]:
    def produce(take: Callable[[str, Tensor], None]) -> None:
        with within():
            gather(world, table, held, lambda _name, entry: torch.empty(entry.shape, dtype=entry.dtype), take)

    return produce


def _nowhere(_name: str, _tensor: Tensor) -> None:
    """On the workers that only send."""
