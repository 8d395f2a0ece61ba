"""What the compressors of workers keep between two messages, where their process is not the only one that has it.

It is a worker's own, and dies with its process. So that a checkpoint has it, each worker gives its servers a copy at
the barrier before one is saved (`Deposit`), in the cuts of the shards. A copy is worth something until the worker's
next push, which takes from what is kept; then it is forgotten, shard by shard. Until then whoever is that worker gets
it: the same process again, another one in its place, or a resumed run's.

A worker that leaves for good hands over what it keeps instead: the sum of all gradients is not to lack it. It is added,
dense, to the next gradient that the shard takes in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError

if TYPE_CHECKING:
    from orchestray.trainers.central.client import ShardClient
    from orchestray.trainers.compression.base import Compressor
    from orchestray.trainers.replica.settings import ReplicaSettings

PREFIX = "residuals/"
"""Of the names under which a server's state and its snapshot hold copies: "residuals/<worker>/<tensor>"."""
_OWED = "owed"
_RESIDUAL = "residual"

Kept = list[dict[str, Tensor]]
"""Of each shard `Compressor.state()`."""


def cut_of(settings: ReplicaSettings) -> list[Any]:
    """The compression, and into how many parts it is cut: another run can go on with it if these are the same."""
    layout = settings.layout
    return [settings.compression, int(settings.exchange["shards"]), layout.tensor, layout.pipeline]


class Residuals:
    """A shard's copies, in the `Machine`: changed by its entries alone."""

    def __init__(self, decoder: Compressor) -> None:
        """
        Args:
            decoder: made as the workers' compressors for this shard, and initialised.
        """
        self._decoder = decoder
        self._held: dict[int, dict[str, Tensor]] = {}
        self._heard: set[int] = set()
        """Workers that keep something there is no copy of."""
        self._owed: Tensor | None = None

    def deposit(self, worker: int, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Keep a copy for a worker.

        Raises:
            TrainingError: it is not what a compressor of this shard keeps.
        """
        told = dict(zip(names, tensors, strict=True))
        self._check(told)
        self._held[worker] = {name: tensor.clone() for name, tensor in told.items()}

    @torch.no_grad()
    def hand_over(self, worker: int, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Take what a worker keeps that is gone from now on; once, however often it is told.

        Raises:
            TrainingError: as `deposit`.
        """
        told = dict(zip(names, tensors, strict=True))
        self._check(told)
        if worker in self._heard or worker in self._held:
            self._owe(told)
        self._held.pop(worker, None)
        self._heard.discard(worker)

    def taken(self, worker: int) -> None:
        """A push of a worker has been taken in: what it keeps is another now."""
        self._held.pop(worker, None)
        self._heard.add(worker)

    @torch.no_grad()
    def add_owed(self, gradient: Tensor) -> None:
        """Add what is owed to a gradient, `[elements]`."""
        if self._owed is not None:
            views = self._decoder.views(self._owed)
            gradient += torch.cat([view.reshape(-1) for view in views]).to(gradient.dtype)

    def paid(self) -> None:
        """The gradient with what was owed has been taken in."""
        self._owed = None

    def of(self, worker: int) -> tuple[dict[str, Tensor], bool]:
        """The copy there is for a worker; and where there is none, whether it keeps something."""
        return self._held.get(worker, {}), worker in self._heard

    def begin(self, saved: Mapping[str, Tensor], num_workers: int | None) -> bool:
        """Go on with what `tensors` told of a checkpoint's shard; returns whether it fits, and does nothing if not.

        Args:
            saved: of the checkpoint.
            num_workers: those from this number on are not there any more, and hand over; None: all may be.
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
        """What a snapshot has: the copies, and what is owed, by name."""
        held = self._held.items()
        named = {f"{PREFIX}{worker}/{name}": tensor for worker, kept in held for name, tensor in kept.items()}
        return named if self._owed is None else {**named, f"{PREFIX}{_OWED}": self._owed}

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All of it: JSON, and tensors."""
        return {"heard": sorted(self._heard)}, self.tensors()

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Become a copy of what `state` told; other tensors may be among them."""
        self._heard = set(state["heard"])
        self._held, self._owed = _taken_apart({name: tensor.clone() for name, tensor in tensors.items()})

    def _owe(self, told: Mapping[str, Tensor]) -> None:
        if (residual := told.get(_RESIDUAL)) is not None:
            self._owed = residual.clone() if self._owed is None else self._owed + residual

    def _check(self, told: Mapping[str, Tensor]) -> None:
        if _shapes_of(told) != self._shapes():
            raise TrainingError("A worker told of what its compressor keeps, and this shard's keeps something else.")

    def _shapes(self) -> dict[str, torch.Size]:
        return _shapes_of(self._decoder.state())


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _taken_apart(tensors: Mapping[str, Tensor]) -> tuple[dict[int, dict[str, Tensor]], Tensor | None]:
    """Of what `Residuals.tensors` told: the copies by worker, and what is owed."""
    held: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        worker, _, name = key.removeprefix(PREFIX).partition("/")
        if key.startswith(PREFIX) and name:
            held.setdefault(int(worker), {})[name] = tensor
    return held, tensors.get(f"{PREFIX}{_OWED}")


def to_file(snapshots: Sequence[Mapping[str, Tensor]], first_shard: int = 0) -> dict[str, Tensor]:
    """What the snapshots of shards that follow each other hold of it, by the names of a checkpoint:
    "shard-<index>/residuals/<worker>/<tensor>".
    """
    return {
        f"shard-{first_shard + index}/{name}": tensor
        for index, snapshot in enumerate(snapshots)
        for name, tensor in snapshot.items()
        if name.startswith(PREFIX)
    }


def of_file(tensors: Iterable[tuple[str, Tensor]], shard: int) -> dict[str, Tensor]:
    """Of what `to_file` made that of one shard, by the names of its snapshot."""
    mine = f"shard-{shard}/"
    return {name.removeprefix(mine): tensor for name, tensor in tensors if name.startswith(mine)}


# -- a worker's end ----------------------------------------------------------------------------------------------------


def kept_by(client: ShardClient | None) -> Kept | None:
    """What a worker's compressors keep; None: it has none."""
    if client is None or client.encoder.compressors is None:
        return None
    return [compressor.state() for compressor in client.encoder.compressors]


def take_up(client: ShardClient, kept: Kept | None) -> bool:
    """Have a worker's compressors go on from where they were, whichever process they were in.

    Args:
        client: that has said hello.
        kept: by this worker in this process before; None: it is new.

    Returns:
        Whether nobody knows what some of them kept; the user should be told so (`lost_text`).
    """
    compressors = client.encoder.compressors or ()
    if not any(compressor.state() for compressor in compressors):
        return False
    is_lost = False
    for shard, (answer, tensors) in enumerate(client.ask_each([({"residual": True}, ())] * len(compressors))):
        if answer["names"]:
            compressors[shard].load_state(dict(zip(answer["names"], tensors, strict=True)))
        elif answer["heard"] and kept is not None:
            compressors[shard].load_state(kept[shard])
        else:
            is_lost |= bool(answer["heard"])
    return is_lost


def lost_text(worker: int) -> str:
    """What the user is told of a worker whose compressors cannot go on from where they were."""
    return (
        f"worker {worker} was lost with what its compression had not sent yet of its gradients; the process in its "
        "place begins with nothing kept."
    )


def deposit(client: ShardClient) -> None:
    """Give every shard a copy of what is kept."""
    _tell(client, "deposit")


def hand_over(client: ShardClient) -> None:
    """Give every shard what is kept: the worker leaves."""
    _tell(client, "hand_over")


def _tell(client: ShardClient, section: str) -> None:
    if (states := kept_by(client)) is not None:
        client.ask_each([({section: list(state)}, list(state.values())) for state in states])
