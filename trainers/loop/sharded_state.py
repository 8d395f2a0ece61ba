"""Saving and loading of a run whose state is sharded over its workers, in the plain model's own layout.

A checkpoint has the same format for every layout. Rank 0 writes it; the workers send their pieces one tensor after the
other. A state of at most `GATHER_LIMIT_BYTES` is gathered in memory and written while training continues. A larger
state is written as it arrives, and needs memory only for its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.comm import objects
from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.checkpoint_files import EXCHANGE_FILE, MODEL_FILE, OPTIMIZER_FILE, RESUME_FILE
from orchestray.platform.run.tensor_file import TensorLayout
from orchestray.trainers.core.buffer_kinds import apply_kinds
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.core.members import saved_name
from orchestray.trainers.core.model_state import BUFFER
from orchestray.trainers.core.own_saving import load_through_modules, loads_itself
from orchestray.trainers.core.transfer import Described, Entry, describe, gather, scatter
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.loop.sharded_buffers import held_transient
from orchestray.trainers.saved.checkpoint_model import BUFFERS
from orchestray.trainers.sync.common.local_tensors import wanted_slots

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.trainers.loop.replica import Replica

GATHER_LIMIT_BYTES = 1 << 30
"""Bytes of model and optimizer state together."""

Source = tuple[Described, Iterable[Tensor]]
"""Names, dtypes and shapes of tensors, and the tensors in the same order."""


@dataclass(frozen=True)
class Streams:
    """A checkpoint, read one tensor at a time."""

    model: Source
    optimizer: Source
    exchange: Source | None
    """Tensors of the replicas' own state; None: there are none."""
    state: Mapping[str, Any]
    resume: Source = ((), ())
    """Tensors of the model that only going on needs."""


def save(
    world: Collective,
    writer: CheckpointWriter | None,
    step: int,
    model: Mapping[str, LocalTensor],
    optimizer: Mapping[str, LocalTensor],
    state: Mapping[str, Any],
    *,
    exchange: Mapping[str, LocalTensor] | None = None,
    resume: Mapping[str, LocalTensor] | None = None,
    consensus: Callable[[], AbstractContextManager[None]] = nullcontext,
    limit_bytes: int = GATHER_LIMIT_BYTES,
) -> None:
    """Save a checkpoint. All workers call, each with its own pieces.

    Args:
        world: all workers.
        writer: the checkpoint writer, on rank 0.
        step: number of completed steps.
        model: the plain model.
        optimizer: the optimizer's state.
        state: JSON values.
        exchange: state that each replica has of its own.
        resume: what the model has besides, for going on.
        consensus: context in which `model` is the consensus model of the replicas.
        limit_bytes: largest state that is gathered in memory.
    """
    parts = {MODEL_FILE: model, OPTIMIZER_FILE: optimizer}
    if exchange is not None:
        parts[EXCHANGE_FILE] = exchange
    if resume is not None:
        parts[RESUME_FILE] = {
            key: LocalTensor(item.tensor, replace(item.piece, name=BUFFER + item.piece.name))
            for key, item in resume.items()
        }
    tables = {file: _in_file_order(describe(world, held)) for file, held in parts.items()}
    if not tables.get(RESUME_FILE, True):
        del parts[RESUME_FILE], tables[RESUME_FILE]
    total = sum(entry.num_bytes for table in tables.values() for entry in table.values())
    if total <= limit_bytes:
        with consensus():
            gathered = {MODEL_FILE: gather_plain(world, model, tables[MODEL_FILE])}
        gathered |= {
            file: gather_plain(world, held, tables[file]) for file, held in parts.items() if file != MODEL_FILE
        }
        if writer is not None:
            plain, slots, own, beside = map(gathered.get, (MODEL_FILE, OPTIMIZER_FILE, EXCHANGE_FILE, RESUME_FILE))
            writer.save_async(step, plain or {}, slots or {}, state, exchange=own, resume=beside)
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


def gather_plain(
    world: Collective, held: Mapping[str, LocalTensor], table: Mapping[str, Entry] | None = None
) -> dict[str, Tensor]:
    """Return the plain tensors on rank 0, an empty mapping elsewhere. All workers call."""
    gathered: dict[str, Tensor] = {}

    def place(name: str, entry: Entry) -> Tensor:
        gathered[name] = torch.empty(entry.shape, dtype=entry.dtype)
        return gathered[name]

    gather(world, describe(world, held) if table is None else table, held, place)
    return gathered


def load(replica: Replica, found: Streams | None) -> Mapping[str, Any] | None:
    """Load model and optimizer of the checkpoint that rank 0 has found, if any.

    All workers call; each keeps its pieces. If another number of members was saved, `members.saved_name` maps the
    names.

    Args:
        replica: replica of this worker, whose exchange holds the model.
        found: on rank 0: the checkpoint.

    Returns:
        The checkpoint's state, on every rank; None if there is none.

    Raises:
        CheckpointError: the checkpoint does not fit, or is damaged.
    """
    world, model, exchange, optimizer = replica.world, replica.model, replica.exchange, replica.optimizer
    state = objects.share_json(world, None if found is None else dict(found.state), 0)
    if state is None:
        return None

    def saved(pieces: Mapping[str, TensorSlice]) -> dict[str, TensorSlice]:
        there, wanted = int(state.get("members", 0)), replica.settings.num_members
        return {
            key: replace(piece, name=saved_name(piece.name, there, wanted, exchange.shared_names))
            for key, piece in pieces.items()
        }

    apply_kinds(model, state.get(BUFFERS, {}))
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
    beside = held_transient(replica)
    wanted = saved({name: item.piece for name, item in beside.items()})
    wanted = {name: replace(piece, name=BUFFER + piece.name) for name, piece in wanted.items()}
    for name, tensor in scatter(world, None if found is None else found.resume, wanted):
        beside[name].tensor.copy_(tensor)
    if loads_itself(model):  # it may do more than take its tensors, which it has
        # Under all names, tied ones too: tensors in shards have no addresses, which would show what is tied.
        load_through_modules(model, model.state_dict(), {})
    return dict(state)


def load_own(world: Collective, source: Source | None, wanted: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
    """Return this replica's own state from the checkpoint that rank 0 has found. All workers call.

    State of an optimizer may be missing: it has none for a parameter that never had a gradient, or before the first
    meeting, and checks the rest.
    So may buffers that a model's state leaves out.

    Args:
        world: all workers.
        source: on rank 0: the saved tensors.
        wanted: pieces that this worker needs, by key.

    Raises:
        CheckpointError: a tensor is missing, or does not fit.
    """
    loaded = dict(scatter(world, source, wanted))
    may_lack = ("optimizer/", "buffer/", "exchange/outer.")
    must_be = [name for name, piece in wanted.items() if piece.shape and not name.startswith(may_lack)]
    if missing := sorted(set(must_be) - set(loaded)):
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
    held: Mapping[str, LocalTensor],
    within: Callable[[], AbstractContextManager[None]],
) -> Callable[[Callable[[str, Tensor], None]], None]:
    def produce(take: Callable[[str, Tensor], None]) -> None:
        with within():
            gather(world, table, held, lambda _name, entry: torch.empty(entry.shape, dtype=entry.dtype), take)

    return produce


def _nowhere(_name: str, _tensor: Tensor) -> None:
    """Ignore a tensor, on workers that only send."""
