"""The state that each replica has of its own: a diverging model with its optimizer, residuals, the scheme's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.loop import sharded_state
from orchestray.trainers.loop.sharded_buffers import held_transient
from orchestray.trainers.sync.common.local_tensors import held_slots, wanted_slots

if TYPE_CHECKING:
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.layout.tensor_slice import TensorSlice
    from orchestray.trainers.loop.replica import Replica


def scheme_of(settings: ReplicaSettings) -> list[Any]:
    """Return the scheme and the number of replicas that a replica's own state belongs to, as JSON values."""
    layout = settings.layout
    scheme = [settings.exchange.get("type", "allreduce"), settings.compression.get("type", "none"), layout.data]
    # The meaning of a residual and the shapes of the state depend on these.
    return [*scheme, settings.compression, layout.tensor] if settings.has_residual else scheme


def fits(settings: ReplicaSettings, saved: Mapping[str, Any]) -> bool:
    """Return True if the replicas' own state in a checkpoint fits this run.

    Args:
        settings: settings of the run.
        saved: JSON values of the checkpoint.
    """
    return _is_kept(settings) and saved.get("replicas") == scheme_of(settings)


def _is_kept(settings: ReplicaSettings) -> bool:
    # Members of an ensemble have no state besides the saved models and optimizers.
    return (settings.diverges or settings.has_residual) and not settings.num_members


def own_state(replica: Replica) -> dict[str, LocalTensor] | None:
    """Return a replica's own state; None if its scheme has none."""
    if not _is_kept(replica.settings):
        return None
    exchange = replica.exchange
    own = {f"exchange/{name}": held for name, held in exchange.state().items()}
    if exchange.diverges:
        own |= {f"model/{name}": held for name, held in exchange.own().items()}
        slots = held_slots(replica.optimizer, exchange.updates())
        own |= {f"optimizer/{name}": held for name, held in slots.items()}
        own |= {f"buffer/{name}": held for name, held in held_transient(replica, of_each_replica=True).items()}
    return {key: LocalTensor(held.tensor, _privately(replica, key, held.piece)) for key, held in own.items()}


def load_own_state(replica: Replica, streams: sharded_state.Streams | None) -> None:
    """Load a replica's own state from a checkpoint that `fits`. All workers call.

    Args:
        replica: replica to load into, whose model and optimizer are those of the checkpoint.
        streams: on rank 0: the checkpoint.
    """
    exchange = replica.exchange
    wanted = {f"exchange/{name}": piece for name, piece in exchange.wanted().items()}
    if exchange.diverges:
        wanted |= {f"model/{name}": held.piece for name, held in exchange.own().items()}
        slots = wanted_slots(replica.optimizer, exchange.updates())
        wanted |= {f"optimizer/{name}": piece for name, piece in slots.items()}
        beside = held_transient(replica, of_each_replica=True)
        wanted |= {f"buffer/{name}": held.piece for name, held in beside.items()}
    wanted = {key: _privately(replica, key, piece) for key, piece in wanted.items()}
    source = streams.exchange if streams is not None else None
    loaded = sharded_state.load_own(replica.world, source, wanted)

    def of(kind: str) -> dict[str, Tensor]:
        return {key.removeprefix(f"{kind}/"): t for key, t in loaded.items() if key.startswith(f"{kind}/")}

    if exchange.diverges:
        for name, tensor in of("model").items():
            exchange.own()[name].tensor.copy_(tensor)
        replica.optimizer.load_state_tensors(of("optimizer"))
        for name, tensor in of("buffer").items():
            beside[name].tensor.copy_(tensor)
    exchange.load_state(of("exchange"))


def optimizer_state(replica: Replica) -> dict[str, LocalTensor]:
    """Return the optimizer's tensors, counted only on the first replica if every replica has its own optimizer."""
    held = held_slots(replica.optimizer, replica.exchange.updates())
    if replica.settings.num_members:
        return dict(held)  # each member has names of its own
    first = not replica.exchange.diverges or replica.groups.coordinate.data == 0
    return {key: LocalTensor(item.tensor, item.piece.counted(first)) for key, item in held.items()}


def _privately(replica: Replica, key: str, piece: TensorSlice) -> TensorSlice:
    """Return the piece under a name that only this replica's workers use."""
    return replace(piece, name=f"replica-{replica.groups.coordinate.data}/{key}")
