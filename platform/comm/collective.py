"""Collective operations among the members of a gang: a `torch.distributed` process group without the module globals.

A `Collective` is an object, not a process-wide setting. So replicas can be threads of one process in a test, and one
process can be in several groups. Every error of the backend becomes `PeerLostError`, and its group is left at once.
With gloo, a member that is not a ring neighbour of the dead one would otherwise wait for the full timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from orchestray.platform.comm.channel.base import Channel
from orchestray.platform.comm.over_host import OverHost
from orchestray.platform.comm.pending import DONE, AllPending, Pending
from orchestray.platform.comm.process_groups import (
    CONNECT_TIMEOUT_S,
    GLOO,
    Backend,
    all_arrive,
    backend_of_default_group,
    connect,
    disconnect,
    start_together,
    timeout_of,
    wait_for_stream,
)
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.process.pulse import PULSE
from orchestray.platform.process.wait_clock import Waiting

Operation = Literal["sum", "max"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
DEFAULT_TIMEOUT_S = 1800.0
_LEFT = "This member has left its group."


class PeerLostError(OrchestrayError):
    """Raised when a collective operation failed: another member died, left, or did not answer in time."""


class Collective:
    """One member's end of a process group (gloo or NCCL).

    Every member must call the same operations in the same order. Operations on a tensor change it in place.

    Args:
        group: a connected `torch.distributed.ProcessGroup` or backend object such as `ProcessGroupGloo`. The collective
            owns it from then on: keep no other reference, or `abort` cannot close its connections.
        store: store through which the group met; needed by `sibling` for a group that `torch.distributed` does not
            know.
        timeout_s: timeout of the group's operations; its siblings get the same.
        path: name of this group, which prefixes the names of its siblings.
        backend: backend of the group; its siblings get the same.
    """

    def __init__(
        self,
        group: Any,
        store: Store | None = None,
        timeout_s: float | None = None,
        *,
        path: str = "group",
        backend: Backend = GLOO,
    ) -> None:
        self.rank = int(group.rank())
        self.size = int(group.size())
        self.timeout_s = timeout_s
        self.waiting = Waiting()
        """Clock of the time this member waits for others, including the operations of its siblings."""
        self.own_bytes_sent = 0
        """Bytes sent by this group's own operations alone."""
        self._group: Any = group
        self._store = store
        self.backend = backend
        self._path = path
        """Name of this group, unique among its siblings and subgroups."""
        self.waits_for_device = backend.kind == "nccl"
        """True if on a GPU `wait` returns once the result is there, and does not only order the streams.

        Set it to False before the first sibling or subgroup is made; `confirm` then says what is there.
        """
        self._lock = threading.Lock()
        self._works: set[_Work] = set()
        self._family: list[Collective] = [self]
        self._siblings: dict[str, Collective] = {}
        self._failure: str | None = None
        self._leaving: threading.Thread | None = None
        self.channels: list[Channel] = []
        """Channels between two of the members, which `close` closes as well."""

    @classmethod
    def gloo(
        cls,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float | None = None,
        *,
        backend: Backend = GLOO,
    ) -> Self:
        """Meet `size - 1` other members in `store`; return when all are connected.

        Args:
            store: store that all members share.
            rank: rank of this member.
            size: number of members.
            timeout_s: timeout of an operation.
            connect_timeout_s: timeout of this meeting; default: the same.
            backend: backend of all members; default: gloo alone.

        Raises:
            PeerLostError: a member did not come in time.
        """
        try:
            group = connect(store, rank, size, timeout_s, connect_timeout_s, backend=backend)
        except RuntimeError as error:
            raise PeerLostError(_sentence("joining the group", rank, size, error)) from error
        return cls(group, store, timeout_s, backend=backend)

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the default group of `torch.distributed`, with the store and the timeout it was made with."""
        group: Any = dist.distributed_c10d._get_default_group()
        timeout_s, backend = timeout_of(group), backend_of_default_group()
        end = OverHost(group) if backend.kind == "over_host" else group
        return cls(end, dist.distributed_c10d._get_default_store(), timeout_s, backend=backend)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this member, including the operations of its siblings.

        Counted by the formulas of bandwidth-optimal algorithms, for a tensor of n bytes and P members: all-reduce
        2(P-1)/P n each (Patarasuk and Yuan 2009, section 2); reduce-scatter and all-gather (P-1)/P n of the whole;
        broadcast (P-1) n at the source; exchange the bytes sent; barrier 0.
        """
        return sum([member.own_bytes_sent for member in self._family])

    @property
    def bytes_by_group(self) -> dict[str, int]:
        """`bytes_sent` by the path of each group: this one, and its siblings and subgroups."""
        return {member._path: member.own_bytes_sent for member in self._family}

    @property
    def has_native_scatter(self) -> bool:
        """True if reduce-scatter and all-gather are the backend's own: NCCL's. Gloo's sends the whole tensor twice."""
        return self.backend.kind == "nccl"

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Combine `tensor` (contiguous, same shape on every rank) over all ranks in place, bit-identical on each."""
        self.start_all_reduce(tensor, operation).wait()

    def start_all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Pending:
        """Start `all_reduce` and return at once; do not touch `tensor` until `wait` has returned."""
        if not tensor.is_contiguous():
            raise ValueError("all_reduce needs a contiguous tensor: its memory is combined in place.")
        if tensor.numel() == 0:
            return DONE
        self.own_bytes_sent += ring_bytes(tensor, self.size)
        reduce, real = _OPERATIONS[operation], _real(tensor)
        return self._start("all-reduce", lambda group: group.allreduce([real], reduce))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor` (same shape and dtype), stacked in rank order: shape `[size, *tensor.shape]`."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if tensor.numel() == 0:
            return gathered
        self.own_bytes_sent += (self.size - 1) * tensor.nbytes
        rows, own = list(_real(gathered).unbind(0)), _real(tensor.contiguous())
        self._start("all-gather", lambda group: group.allgather([rows], [own])).wait()
        return gathered

    def start_reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        """Start to sum `whole` over all ranks, and to keep elements rank n to (rank + 1) n of the sum in `part`.

        Both are contiguous, n is the number of elements of `part`, and `whole` has `size` times as many. The content of
        `whole` is undefined afterwards.
        """
        self._check_parts(part, whole)
        if part.numel() == 0:
            return DONE
        self.own_bytes_sent += (self.size - 1) * part.nbytes
        into, of = _real(part).view(-1), _real(whole).view(-1)
        return self._start("reduce-scatter", lambda group: group._reduce_scatter_base(into, of))

    def start_all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        """Start to fill `whole` with every rank's `part`, in rank order; shapes as in `start_reduce_scatter`."""
        self._check_parts(part, whole)
        if part.numel() == 0:
            return DONE
        self.own_bytes_sent += (self.size - 1) * part.nbytes
        into, of = _real(whole).view(-1), _real(part).view(-1)
        return self._start("all-gather", lambda group: group._allgather_base(into, of))

    def _check_parts(self, part: Tensor, whole: Tensor) -> None:
        if not (part.is_contiguous() and whole.is_contiguous()):
            raise ValueError("reduce-scatter and all-gather need contiguous tensors.")
        if whole.numel() != self.size * part.numel():
            raise ValueError(f"Expected a whole of {self.size} x {part.numel()} elements, got {whole.numel()}.")

    def start_exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> Pending:
        """Start to send one tensor to each of some ranks and to fill one from each of some ranks, all at once.

        Both sides name each other in the same call. Tensors are contiguous, and agree in dtype and size. One call is
        one operation: on GPUs, receives that are started before the sends, one by one, wait for each other for ever.

        Args:
            send: tensor to send to each rank.
            receive: tensor to fill from each rank.

        Raises:
            ValueError: a tensor is not contiguous, or they are of several devices, whose messages do not meet.
        """
        if any(not tensor.is_contiguous() for tensor in (*send.values(), *receive.values())):
            raise ValueError("exchange needs contiguous tensors.")
        if len(devices := {str(tensor.device) for tensor in (*send.values(), *receive.values())}) > 1:
            raise ValueError(f"exchange needs tensors of one device, got some of {', '.join(sorted(devices))}.")
        self.own_bytes_sent += sum(tensor.nbytes for tensor in send.values())
        received = [(peer, tensor) for peer, tensor in receive.items() if tensor.numel()]
        sent = [(peer, tensor) for peer, tensor in send.items() if tensor.numel()]
        if not received and not sent:
            return DONE
        return self._start("exchange", lambda group: AllPending(start_together(group, sent, received)))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` (contiguous, any dtype) with that of rank `source`."""
        if not tensor.is_contiguous():
            raise ValueError("broadcast needs a contiguous tensor: its memory is overwritten in place.")
        if tensor.numel() == 0:
            return
        if self.rank == source:
            self.own_bytes_sent += (self.size - 1) * tensor.nbytes
        raw = tensor.detach().view(-1).view(torch.uint8)  # gloo supports few dtypes; bytes always work
        self._start("broadcast", lambda group: group.broadcast(raw, source)).wait()

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self._start("barrier", lambda group: group.barrier()).wait()

    def sibling(self, name: str) -> Collective:
        """Return another group of the same members with an order of operations of its own; all ranks must call this.

        The first call for a name connects the group; later ones return it. A sibling lives and dies with this one.
        """
        return self._relative(f"{self._path}/{name}", list(range(self.size)))

    def subgroup(self, name: str, ranks: Sequence[int]) -> Collective:
        """Return the group of some of the members; all of those must call this.

        The group lives and dies with this one.

        Args:
            name: name that is used for these ranks only.
            ranks: ranks of this group, in the order of their ranks in the new one. All ranks give this group itself,
                and a single rank gives a `SoloCollective`.

        Raises:
            ValueError: this member is not among the ranks.
        """
        if list(ranks) == list(range(self.size)):
            return self
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is none of the ranks {list(ranks)} of the group {name!r}")
        if len(ranks) == 1:
            from orchestray.platform.comm.solo import SoloCollective  # late: it is a collective itself

            return SoloCollective()
        return self._relative(f"{self._path}/{name}", list(ranks))

    def prefix_store(self, name: str) -> Store:
        """Return the store the members met in, under a prefix of this name, for connections of another kind."""
        if self._store is None:
            raise ValueError("this group was made without a store")
        return PrefixStore(f"{self._path}/{name}", self._store)

    def _relative(self, path: str, ranks: list[int]) -> Collective:
        if path not in self._siblings:
            if self._group is None:
                raise PeerLostError(self._failure or _LEFT)
            member = self._connect_relative(path, ranks)
            member.waiting = self.waiting
            member.waits_for_device = self.waits_for_device
            member._family = self._family
            member._siblings = self._siblings
            self._family.append(member)
            if self._group is None:  # left meanwhile: on GPUs nobody would end what the new group waits for
                member.abort()
                raise PeerLostError(self._failure or _LEFT)
            self._siblings[path] = member
        return self._siblings[path]

    def confirm(self) -> None:
        """Return when the results of all operations that were waited for are there.

        Raises:
            PeerLostError: the group was left meanwhile, so that results of NCCL may be undefined.
        """
        self._wait_for_device()
        if self._failure is not None:
            raise PeerLostError(self._failure)

    def _wait_for_device(self) -> None:
        if self.backend.kind == "nccl":
            with PULSE.waiting():  # not counted as a wait for others: this member's own work may be under way
                wait_for_stream(self.backend.device)

    @property
    def is_left(self) -> bool:
        """True if this member has left the group."""
        return self._group is None

    def abort(self) -> None:
        """Leave the group and close its connections: pending operations raise at once, here and at the others.

        On GPUs the others notice nothing: NCCL reports no lost peer. Whoever learns of the loss must abort there too,
        as the driver does. Safe to call from any thread and more than once. Returns without waiting.
        """
        self._leave(_LEFT)

    def close(self) -> None:
        """Leave the group, and return when its threads and channels have ended too."""
        for channel in self.channels:
            channel.close()
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
            group = connect(store, rank, size, timeout_s, CONNECT_TIMEOUT_S, backend=self.backend)
            return Collective(group, self._store, timeout_s, path=path, backend=self.backend)
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
        return PeerLostError(self._failure or _LEFT)  # the first reason: others follow from it

    def _leave(self, reason: str) -> None:
        groups: list[Any] = []
        for member in self._family:  # with those that another thread adds meanwhile
            with member._lock:
                member._failure = member._failure or reason
                if member._group is not None:
                    groups.append(member._group)
                member._group = None
                for work in tuple(member._works):
                    work._work = None
                member._works.clear()
        if groups:
            disconnect(groups)
            # The destructor of a gloo group waits for its queued operations: the caller must not wait for that.
            leaving = threading.Thread(target=groups.clear, name="orchestray-leave-group", daemon=True)
            for member in self._family:
                member._leaving = leaving
            leaving.start()


class _Work:
    """A pending backend operation; it keeps the group's connections open as long as it exists."""

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
            return  # already waited for
        try:
            with collective.waiting.during():
                work.wait()
            if collective.waits_for_device:
                collective._wait_for_device()
        except RuntimeError as error:
            del work
            error.with_traceback(None)  # its frames hold the operations of an exchange, and so the connections
            raise collective._fail(self._what, error) from error
        self._work = None
        collective._works.discard(self)
        if collective._failure is not None:  # NCCL's waits end by an abort without an error, and with undefined results
            raise PeerLostError(collective._failure)


def ring_bytes(tensor: Tensor, size: int) -> int:
    """Return the bytes each of `size` members sends to all-reduce `tensor` in a ring: 2(P-1)/P of it, rounded up."""
    return -(-2 * (size - 1) * tensor.nbytes // size)


def _real(tensor: Tensor) -> Tensor:
    """Return a view of complex numbers as pairs, which the backends can add; other tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _sentence(what: str, rank: int, size: int, error: RuntimeError) -> str:
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"Rank {rank} of {size} lost a peer during {what}: {cause}"
