"""Collective operations among the members of a gang: a `torch.distributed` process group without the module globals.

A `Collective` is an object, not a process-wide setting, so replicas can be threads of one process in a test and one
process can be in several groups. Whatever the backend raises becomes `PeerLostError`, and the group that raised it is
left at once, for a reason seen with gloo: a member that is no neighbour of the dead one in the ring waits for the full
timeout unless those that noticed close their connections too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from orchestray.platform.errors import OrchestrayError
from orchestray.platform.process_groups import CONNECT_TIMEOUT_S, all_arrive, connect, disconnect, timeout_of
from orchestray.platform.waiting import Waiting

Operation = Literal["sum", "max"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
DEFAULT_TIMEOUT_S = 1800.0
_LEFT = "This member has left its group."


class PeerLostError(OrchestrayError):
    """A collective operation failed: another member died, left, or did not answer in time."""


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the result is there; `PeerLostError` if it will never be."""


class Collective:
    """One member's end of a process group (gloo or NCCL).

    Every member must call the same operations in the same order. Operations on a tensor change it in place.

    Args:
        group: a connected `torch.distributed.ProcessGroup` or backend object such as `ProcessGroupGloo`. The collective
            owns it from then on: keep no other reference, or `abort` cannot close its connections.
        store: what the group met through; needed by `sibling` for a group that `torch.distributed` does not know.
        timeout_s: what the group was made with, and its siblings will be.
    """

    def __init__(
        self, group: Any, store: Store | None = None, timeout_s: float | None = None, *, path: str = "group"
    ) -> None:
        self.rank = int(group.rank())
        self.size = int(group.size())
        self.timeout_s = timeout_s
        self.waiting = Waiting()
        """What this member waits for others, its siblings' operations included."""
        self._sent_bytes = 0
        self._group: Any = group
        self._store = store
        self._path = path
        """Names this group among those of its family."""
        self._lock = threading.Lock()
        self._works: set[_Work] = set()
        self._family: list[Collective] = [self]
        self._siblings: dict[str, Collective] = {}
        self._failure: str | None = None
        self._leaving: threading.Thread | None = None

    @classmethod
    def gloo(
        cls,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float | None = None,
    ) -> Self:
        """Meet `size - 1` others in `store`; returns when all are there.

        Args:
            timeout_s: of an operation.
            connect_timeout_s: of this meeting; default: the same.
        """
        try:
            group = connect(store, rank, size, timeout_s, connect_timeout_s)
        except RuntimeError as error:
            raise PeerLostError(_sentence("joining the group", rank, size, error)) from error
        return cls(group, store, timeout_s)

    @classmethod
    def of_this_process(cls) -> Self:
        """The default group of `torch.distributed`, with the store and the timeout it was made with."""
        group = dist.distributed_c10d._get_default_group()
        return cls(group, dist.distributed_c10d._get_default_store(), timeout_of(group))

    @property
    def bytes_sent(self) -> int:
        """What this member has sent, its siblings' operations included.

        Counted by the algebra of bandwidth-optimal algorithms, n being the bytes of the tensor and P the members:
        all-reduce 2(P-1)/P n each (Patarasuk and Yuan 2009, section 2), reduce-scatter and all-gather (P-1)/P n each
        of the whole, broadcast (P-1) n at the source, exchange what is sent, barrier nothing.
        """
        return sum(member._sent_bytes for member in self._family)

    @property
    def own_bytes_sent(self) -> int:
        """As `bytes_sent`, of this group's own operations alone."""
        return self._sent_bytes

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Combine `tensor` (contiguous, any shape, the same on every rank) over all ranks, bit-identical on each."""
        self.start_all_reduce(tensor, operation).wait()

    def start_all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Pending:
        """As `all_reduce`, returning at once; leave `tensor` alone until `wait` has returned."""
        if not tensor.is_contiguous():
            raise ValueError("all_reduce needs a contiguous tensor: its memory is combined in place.")
        if tensor.numel() == 0:
            return _DONE
        self._sent_bytes += ring_bytes(tensor, self.size)
        reduce = _OPERATIONS[operation]
        return self._start("all-reduce", lambda group: group.allreduce([tensor], reduce))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's `tensor` (same shape and dtype), stacked in rank order: shape `[size, *tensor.shape]`."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if tensor.numel() == 0:
            return gathered
        self._sent_bytes += (self.size - 1) * tensor.nbytes
        rows = list(gathered.unbind(0))
        self._start("all-gather", lambda group: group.allgather([rows], [tensor.contiguous()])).wait()
        return gathered

    def start_reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        """Sum `whole` over all ranks, each keeping an equal part: `part` becomes elements rank n to (rank + 1) n of it.

        Both are contiguous, `whole` has `size` times the elements of `part`, and is left in no defined state.
        """
        self._check_parts(part, whole)
        if part.numel() == 0:
            return _DONE
        self._sent_bytes += (self.size - 1) * part.nbytes
        return self._start("reduce-scatter", lambda group: group._reduce_scatter_base(part.view(-1), whole.view(-1)))

    def start_all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        """Fill `whole` with every rank's `part`, in rank order; shapes as in `start_reduce_scatter`."""
        self._check_parts(part, whole)
        if part.numel() == 0:
            return _DONE
        self._sent_bytes += (self.size - 1) * part.nbytes
        return self._start("all-gather", lambda group: group._allgather_base(whole.view(-1), part.view(-1)))

    def _check_parts(self, part: Tensor, whole: Tensor) -> None:
        if not (part.is_contiguous() and whole.is_contiguous()):
            raise ValueError("reduce-scatter and all-gather need contiguous tensors.")
        if whole.numel() != self.size * part.numel():
            raise ValueError(f"Expected a whole of {self.size} x {part.numel()} elements, got {whole.numel()}.")

    def start_exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> Pending:
        """Send a tensor to each of some ranks and fill one from each of some ranks, all at once.

        Both sides name each other in the same call; tensors are contiguous, and agree in dtype and size.
        """
        if any(not tensor.is_contiguous() for tensor in (*send.values(), *receive.values())):
            raise ValueError("exchange needs contiguous tensors.")
        works: list[Pending] = []
        for peer, tensor in receive.items():
            if tensor.numel():
                works.append(self._start("exchange", _receive(tensor, peer)))
        for peer, tensor in send.items():
            if tensor.numel():
                self._sent_bytes += tensor.nbytes
                works.append(self._start("exchange", _send(tensor, peer)))
        return _All(works)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` (contiguous, any dtype) with that of rank `source`."""
        if not tensor.is_contiguous():
            raise ValueError("broadcast needs a contiguous tensor: its memory is overwritten in place.")
        if tensor.numel() == 0:
            return
        if self.rank == source:
            self._sent_bytes += (self.size - 1) * tensor.nbytes
        raw = tensor.detach().view(-1).view(torch.uint8)  # gloo knows few dtypes; bytes are bytes
        self._start("broadcast", lambda group: group.broadcast(raw, source)).wait()

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._start("barrier", lambda group: group.barrier()).wait()

    def sibling(self, name: str) -> Collective:
        """Another group of the same members, whose operations are ordered apart from this one's. All ranks must ask.

        The first call for a name connects the group; later ones return it. A sibling lives and dies with this one.
        """
        return self._relative(f"{self._path}/{name}", list(range(self.size)))

    def subgroup(self, name: str, ranks: Sequence[int]) -> Collective:
        """The group of some of the members, `ranks` of this one in their order there; those members all must ask.

        The name belongs to these ranks alone. A group of all is this one itself, a group of one is solo. It lives and
        dies with this one.
        """
        if list(ranks) == list(range(self.size)):
            return self
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is none of the ranks {list(ranks)} of the group {name!r}")
        if len(ranks) == 1:
            return SoloCollective()
        return self._relative(f"{self._path}/{name}", list(ranks))

    def prefix_store(self, name: str) -> Store:
        """The store the members met in, under a prefix of this name: for connections of another kind."""
        if self._store is None:
            raise ValueError("this group was made without a store")
        return PrefixStore(f"{self._path}/{name}", self._store)

    def _relative(self, path: str, ranks: list[int]) -> Collective:
        if path not in self._siblings:
            if self._group is None:
                raise PeerLostError(self._failure or _LEFT)
            member = self._connect_relative(path, ranks)
            member.waiting = self.waiting
            member._family = self._family
            member._siblings = self._siblings
            self._family.append(member)
            self._siblings[path] = member
        return self._siblings[path]

    def abort(self) -> None:
        """Leave: close the connections, so that whatever is under way here raises at once, on the others and on whoever
        waits for it in this process.

        Safe to call from any thread and more than once. Returns without waiting.
        """
        self._leave(_LEFT)

    def close(self) -> None:
        """Leave, and return when the group's threads have ended, too."""
        self._leave(_LEFT)
        if self._leaving is not None:
            self._leaving.join()

    def _connect_relative(self, path: str, ranks: list[int]) -> Collective:
        try:
            if self._store is None:
                if len(ranks) != self.size:
                    raise ValueError("a subgroup needs a group that was made with a store")
                timeout = None if self.timeout_s is None else timedelta(seconds=self.timeout_s)
                return Collective(dist.new_group(timeout=timeout, group_desc=path), timeout_s=self.timeout_s, path=path)
            timeout_s = self.timeout_s or DEFAULT_TIMEOUT_S
            rank, size, store = ranks.index(self.rank), len(ranks), PrefixStore(path, self._store)
            if not all_arrive(store, size, lambda: self._group is None, timeout_s):
                raise PeerLostError(self._failure or _LEFT)
            group = connect(store, rank, size, timeout_s, CONNECT_TIMEOUT_S)
            return Collective(group, self._store, timeout_s, path=path)
        except RuntimeError as error:
            raise self._fail("joining the group", error) from error

    def _start(self, what: str, launch: Any) -> _Work:
        # No local variable may hold the group: the traceback of an exception would keep it, and its connections, alive.
        try:
            with self._lock:
                if self._group is None:
                    raise PeerLostError(self._failure or _LEFT)
                work = _Work(self, what, launch(self._group))
                self._works.add(work)
        except RuntimeError as error:
            error.with_traceback(None)  # its frames hold the group
            raise self._fail(what, error) from error
        return work

    def _fail(self, what: str, error: RuntimeError) -> PeerLostError:
        self._leave(_sentence(what, self.rank, self.size, error))
        return PeerLostError(self._failure or _LEFT)  # the first reason: other operations fail of the leaving alone

    def _leave(self, reason: str) -> None:
        groups: list[Any] = []
        for member in tuple(self._family):
            with member._lock:
                member._failure = member._failure or reason
                if member._group is not None:
                    groups.append(member._group)
                member._group = None
                for work in tuple(member._works):
                    work.drop()
                member._works.clear()
        if groups:
            disconnect(groups)
            # The destructor of a gloo group waits for its queued operations: not in the caller's time.
            leaving = threading.Thread(target=groups.clear, name="orchestray-leave-group", daemon=True)
            for member in self._family:
                member._leaving = leaving
            leaving.start()


class _Work:
    """A backend operation under way; holds the group's connections open as long as it is there."""

    __slots__ = ("_collective", "_what", "_work")

    def __init__(self, collective: Collective, what: str, work: Any) -> None:
        self._collective = collective
        self._what = what
        self._work = work

    def wait(self) -> None:
        work, collective = self._work, self._collective
        if work is None:
            if collective._failure is not None:
                raise PeerLostError(collective._failure)
            return  # waited for before
        try:
            with collective.waiting.during():
                work.wait()
        except RuntimeError as error:
            del work
            raise collective._fail(self._what, error) from error
        self._work = None
        collective._works.discard(self)

    def drop(self) -> None:
        self._work = None


class _All:
    """Several operations under way."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Done:
    """Of an operation with nothing to do."""

    def wait(self) -> None:
        return


_DONE = _Done()


class SoloCollective(Collective):
    """A group of one: every operation is done before it began, and nothing is sent."""

    def __init__(self) -> None:
        super().__init__(_Solo())

    def start_all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Pending:
        return _DONE

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.clone().unsqueeze(0)

    def start_reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        self._check_parts(part, whole)
        part.view(-1).copy_(whole.view(-1))
        return _DONE

    def start_all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        self._check_parts(part, whole)
        whole.view(-1).copy_(part.view(-1))
        return _DONE

    def broadcast(self, tensor: Tensor, source: int) -> None:
        return

    def barrier(self) -> None:
        return

    def sibling(self, name: str) -> Collective:
        return self

    def prefix_store(self, name: str) -> Store:
        raise ValueError("a lone member has nobody to meet")


class _Solo:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def abort(self) -> None:
        return


def ring_bytes(tensor: Tensor, size: int) -> int:
    """Bytes one of `size` members sends to all-reduce `tensor` around a ring: 2(P-1)/P of the tensor's, rounded up."""
    return -(-2 * (size - 1) * tensor.nbytes // size)


def _send(tensor: Tensor, peer: int) -> Callable[[Any], Any]:
    return lambda group: group.send([tensor], peer, 0)


def _receive(tensor: Tensor, peer: int) -> Callable[[Any], Any]:
    return lambda group: group.recv([tensor], peer, 0)


def _sentence(what: str, rank: int, size: int, error: RuntimeError) -> str:
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"Rank {rank} of {size} lost a peer during {what}: {cause}"
