"""Saving and loading a run whose state is spread over its workers, in the plain model's own layout.

A checkpoint looks the same whatever made it. Rank 0 writes it; the workers send it their pieces one tensor after the
other. Up to `GATHER_LIMIT_BYTES` they are brought together in memory and written beside the training; a larger state is
written as it comes, and needs no more memory than its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.checkpoint_files import MODEL_FILE, OPTIMIZER_FILE
from orchestray.platform.run.tensor_file import TensorLayout
from orchestray.trainers import agreement
from orchestray.trainers.exchange.base import Held, Update
from orchestray.trainers.layout.pieces import Piece
from orchestray.trainers.layout.transfer import Described, Entry, describe, gather, scatter

if TYPE_CHECKING:
    from orchestray.platform.collective import Collective
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.trainers.exchange.base import Exchange
    from orchestray.trainers.optimizers import Optimizer

GATHER_LIMIT_BYTES = 1 << 30
"""Of the model and the optimizer's state together."""

Source = tuple[Described, Iterable[Tensor]]
"""Names, dtypes and shapes of tensors, and the tensors in that order."""


def held_optimizer(optimizer: Optimizer, updates: Iterable[Update]) -> dict[str, Held]:
    """The optimizer's state as this worker holds it, by "<parameter>.<slot>" with the worker's own names."""
    piece_of = {update.name: update.piece for update in updates}
    held: dict[str, Held] = {}
    for key, tensor in optimizer.state_tensors().items():
        name, _, slot = key.rpartition(".")
        piece = piece_of[name]
        plain_key = f"{piece.name}.{slot}"
        if tensor.dim() == 0:
            held[key] = Held(tensor, Piece.whole(plain_key, (), is_counted=piece.is_counted))
        else:
            held[key] = Held(tensor, Piece(plain_key, piece.shape, piece.ranges, piece.is_counted))
    return held


def save(
    world: Collective,
    writer: CheckpointWriter | None,
    step: int,
    model: Mapping[str, Held],
    optimizer: Mapping[str, Held],
    state: Mapping[str, Any],
    *,
    limit_bytes: int = GATHER_LIMIT_BYTES,
) -> None:
    """Save a checkpoint. All workers call, with what each holds; `writer` is given on rank 0."""
    parts = {MODEL_FILE: model, OPTIMIZER_FILE: optimizer}
    tables = {file: _in_file_order(describe(world, held)) for file, held in parts.items()}
    total = sum(entry.num_bytes for table in tables.values() for entry in table.values())
    if total <= limit_bytes:
        brought = {file: bring_together(world, held, tables[file]) for file, held in parts.items()}
        if writer is not None:
            writer.save_async(step, brought[MODEL_FILE], brought[OPTIMIZER_FILE], state)
        return
    producers = {file: _producer(world, tables[file], held) for file, held in parts.items()}
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
    found: tuple[Source, Source, Mapping[str, Any]] | None,
    exchange: Exchange,
    optimizer: Optimizer,
) -> Mapping[str, Any] | None:
    """Load a checkpoint that rank 0 has found, if it has. All workers call; each keeps its pieces.

    Returns:
        The checkpoint's state, on every rank; None if there is none.

    Raises:
        CheckpointError: it does not fit, or is damaged.
    """
    state = agreement.share_json(world, None if found is None else dict(found[2]), 0)
    if state is None:
        return None
    held = exchange.held()
    seen = set()
    for name, tensor in scatter(world, None if found is None else found[0], {k: h.piece for k, h in held.items()}):
        held[name].tensor.detach().copy_(tensor)
        seen.add(name)
    if missing := sorted(set(held) - seen):
        raise CheckpointError(f"The saved weights do not fit the model; missing: {', '.join(missing[:5])}.")
    wanted = _wanted_slots(optimizer, exchange.updates())
    slots = dict(scatter(world, None if found is None else found[1], wanted))
    optimizer.load_state_tensors(slots)
    return dict(state)


def _wanted_slots(optimizer: Optimizer, updates: Iterable[Update]) -> dict[str, Piece]:
    wanted = {}
    for update in updates:
        for slot in optimizer.slots:
            key, plain = f"{update.name}.{slot}", f"{update.piece.name}.{slot}"
            if slot == "step":
                wanted[key] = Piece.whole(plain, ())
            else:
                wanted[key] = Piece(plain, update.piece.shape, update.piece.ranges)
    return wanted


def _in_file_order(table: Mapping[str, Entry]) -> dict[str, Entry]:
    return {name: table[name] for name in _layout(table).slots}


def _layout(table: Mapping[str, Entry]) -> TensorLayout:
    return TensorLayout.of(
        {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in table.items()}
    )


def _producer(
    world: Collective, table: Mapping[str, Entry], held: Mapping[str, Held]
) -> Callable[[Callable[[str, Tensor], None]], None]:
    def produce(take: Callable[[str, Tensor], None]) -> None:
        gather(world, table, held, lambda _name, entry: torch.empty(entry.shape, dtype=entry.dtype), take)

    return produce


def _nowhere(_name: str, _tensor: Tensor) -> None:
    """On the workers that only send."""
