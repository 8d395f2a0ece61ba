"""The state of workers' compressors (error feedback residuals), copied to the servers for checkpoints.

The state is a worker's own and is lost with its process. So that a checkpoint contains it, each worker gives its
servers a copy at the barrier before one is saved (`Deposit`), cut like the shards. A copy is valid until the worker's
next push, which changes the state; then it is forgotten, shard by shard. Until then any process with that worker's
number gets the copy: the same process again, one that replaces it, or a resumed run's.

A worker that leaves for good hands its state over instead, so that the sum of all gradients does not lack it. The state
is added, dense, to the next gradient that the shard applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.comm.flat_tensors import flatten
from orchestray.platform.errors import TrainingError
from orchestray.trainers.ps.protocol.requests import Part, Request

if TYPE_CHECKING:
    from orchestray.trainers.compression.base import Compressor
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.ps.worker.client import ShardClient

PREFIX = "residuals/"
"""Prefix of the names under which a server's state and its snapshot hold copies: "residuals/<worker>/<tensor>"."""
_OWED = "owed"
_RESIDUAL = "residual"

Kept = list[dict[str, Tensor]]
"""`Compressor.state()` of each shard."""


def cut_of(settings: ReplicaSettings) -> list[Any]:
    """Return the compression and its cuts; another run can continue with a state if these are the same."""
    layout = settings.layout
    return [settings.compression, int(settings.exchange["shards"]), layout.tensor, layout.pipeline]


class Residuals:
    """The copies that one shard holds, in the `Machine`; only its entries change them."""

    def __init__(self, decoder: Compressor) -> None:
        """
        Args:
            decoder: compressor made like the workers' compressors for this shard, and initialised.
        """
        self._decoder = decoder
        self._held: dict[int, dict[str, Tensor]] = {}
        self._heard: set[int] = set()
        """Workers whose compressors have a state of which the shard has no copy."""
        self._owed: Tensor | None = None
        self._pushed: dict[int, list[list[int]]] = {}
        """Step and share of all that each worker's last applied push sums."""

    def deposit(self, worker: int, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Keep a copy of a worker's state.

        Args:
            worker: number of the worker.
            names: names of the state's tensors.
            tensors: tensors of the state.

        Raises:
            TrainingError: the shapes are not those of a compressor of this shard.
        """
        state = dict(zip(names, tensors, strict=True))
        self._check(state)
        self._held[worker] = {name: tensor.clone() for name, tensor in state.items()}

    @torch.no_grad()
    def hand_over(self, worker: int, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Take over the state of a worker that leaves. Repeated calls have no further effect.

        Args:
            worker: number of the worker.
            names: names of the state's tensors.
            tensors: tensors of the state.

        Raises:
            TrainingError: the shapes are not those of a compressor of this shard.
        """
        state = dict(zip(names, tensors, strict=True))
        self._check(state)
        if worker in self._heard or worker in self._held:
            self._owe(state)
        self._held.pop(worker, None)
        self._heard.discard(worker)

    def taken(self, worker: int, parts: Sequence[Part]) -> None:
        """Record that a worker's push of these shares has been applied, which changes its state."""
        self._held.pop(worker, None)
        self._heard.add(worker)
        self._pushed[worker] = _pairs_of(parts)

    def has(self, worker: int, parts: Sequence[Part]) -> bool:
        """Return True if the worker's own push of these shares was applied, perhaps before it was sent again."""
        return self._pushed.get(worker) == _pairs_of(parts)

    @torch.no_grad()
    def add_owed(self, gradient: Tensor) -> None:
        """Add the states that were handed over to a gradient, `[elements]`."""
        if self._owed is not None:
            gradient += flatten(self._decoder.views(self._owed)).to(gradient.dtype)

    def paid(self) -> None:
        """Record that the gradient with the states that were handed over has been applied."""
        self._owed = None

    def of(self, worker: int) -> tuple[dict[str, Tensor], bool]:
        """Return the copy for a worker (empty: none), and True if the worker has a state without a copy."""
        return self._held.get(worker, {}), worker in self._heard

    def begin(self, saved: Mapping[str, Tensor], num_workers: int | None) -> bool:
        """Continue with the copies of a checkpoint's shard; return False, and do nothing, if they do not fit.

        Args:
            saved: result of `tensors`, from the checkpoint.
            num_workers: number of workers; the states of those from this number on are handed over. None: all may be
                present.
        """
        held, owed = _taken_apart(saved)
        wanted = self._shapes()
        if any(_shapes_of(kept) != wanted for kept in held.values()):
            return False
        if owed is not None and owed.shape != wanted.get(_RESIDUAL):
            return False
        self._held, self._heard, self._owed = held, set(), owed
        for worker in list(held):
            if num_workers is not None and worker >= num_workers:
                self._owe(self._held.pop(worker))
        return True

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies and the states that were handed over, by the names of a snapshot."""
        held = self._held.items()
        named = {f"{PREFIX}{worker}/{name}": tensor for worker, kept in held for name, tensor in kept.items()}
        return named if self._owed is None else {**named, f"{PREFIX}{_OWED}": self._owed}

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the whole state: JSON values, and tensors."""
        return {"heard": sorted(self._heard), "pushed": sorted(self._pushed.items())}, self.tensors()

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Become a copy of the object whose `state` this is; other tensors may be among them."""
        self._heard, self._pushed = set(state["heard"]), dict(state.get("pushed", ()))
        self._held, self._owed = _taken_apart({name: tensor.clone() for name, tensor in tensors.items()})

    def _owe(self, state: Mapping[str, Tensor]) -> None:
        if (residual := state.get(_RESIDUAL)) is not None:
            self._owed = residual.clone() if self._owed is None else self._owed + residual

    def _check(self, state: Mapping[str, Tensor]) -> None:
        if _shapes_of(state) != self._shapes():
            raise TrainingError("A worker told of what its compressor keeps, and this shard's keeps something else.")

    def _shapes(self) -> dict[str, torch.Size]:
        return _shapes_of(self._decoder.state())


def _pairs_of(parts: Sequence[Part]) -> list[list[int]]:
    return [[part.step, part.share] for part in parts]


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _taken_apart(tensors: Mapping[str, Tensor]) -> tuple[dict[int, dict[str, Tensor]], Tensor | None]:
    """Split the result of `Residuals.tensors` into the copies by worker and the sum of the states that were handed
    over.
    """
    held: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        worker, _, name = key.removeprefix(PREFIX).partition("/")
        if key.startswith(PREFIX) and name:
            held.setdefault(int(worker), {})[name] = tensor
    return held, tensors.get(f"{PREFIX}{_OWED}")


def to_file(snapshots: Sequence[Mapping[str, Tensor]], first_shard: int = 0) -> dict[str, Tensor]:
    """Return the copies in the snapshots of consecutive shards, by the names of a checkpoint.

    The names are "shard-<index>/residuals/<worker>/<tensor>".

    Args:
        snapshots: snapshot of each shard.
        first_shard: index of the first of them.
    """
    return {
        f"shard-{first_shard + index}/{name}": tensor
        for index, snapshot in enumerate(snapshots)
        for name, tensor in snapshot.items()
        if name.startswith(PREFIX)
    }


def of_file(tensors: Iterable[tuple[str, Tensor]], shard: int) -> dict[str, Tensor]:
    """Return one shard's copies of those in the result of `to_file`, by the names of its snapshot."""
    mine = f"shard-{shard}/"
    return {name.removeprefix(mine): tensor for name, tensor in tensors if name.startswith(mine)}


# -- the worker's side -------------------------------------------------------------------------------------------------


def kept_by(client: ShardClient | None) -> Kept | None:
    """Return the state of a worker's compressors, by shard; None if it has no compressors."""
    if client is None or client.encoder.compressors is None:
        return None
    return [compressor.state() for compressor in client.encoder.compressors]


def take_up(client: ShardClient, kept: Kept | None) -> bool:
    """Have a worker's compressors continue from their last state, in whichever process that was.

    Args:
        client: client that has sent `hello`.
        kept: state of this worker in this process before; None: the process is new.

    Returns:
        True if the state of some of them is lost; the user should then be shown `lost_text`.
    """
    compressors = client.encoder.compressors or ()
    if not any(compressor.state() for compressor in compressors):
        return False
    is_lost = False
    for shard, (answer, tensors) in enumerate(client.ask_each([(Request(residual=True), ())] * len(compressors))):
        if answer.names:
            compressors[shard].load_state(dict(zip(answer.names, tensors, strict=True)))
        elif answer.heard and kept is not None:
            compressors[shard].load_state(kept[shard])
        else:
            is_lost |= answer.heard
    return is_lost


def lost_text(worker: int) -> str:
    """Return the warning for a worker whose compressors' state is lost."""
    return (
        f"worker {worker} was lost with what its compression had not sent yet of its gradients; the process in its "
        "place begins with nothing kept."
    )


def deposit(client: ShardClient) -> None:
    """Give every shard a copy of the compressors' state."""
    if (states := kept_by(client)) is not None:
        client.ask_each([(Request(deposit=tuple(state)), list(state.values())) for state in states])


def hand_over(client: ShardClient) -> None:
    """Hand the compressors' state over to every shard, because the worker leaves."""
    if (states := kept_by(client)) is not None:
        client.ask_each([(Request(hand_over=tuple(state)), list(state.values())) for state in states])
