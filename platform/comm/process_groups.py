"""Process groups of `torch.distributed`: connecting them, the timeouts of their operations, and ending them.

Facts about gloo that this is built around (torch 2.13):

- Connecting cannot be cancelled, and waits for dead members. So the members check in their store that all have come
  before they connect.
- `abort()` and `shutdown()` close nothing, and a pending wait keeps the connections open. But a receive whose `wait`
  times out closes all connections of its group, and every pending operation raises, here and at the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

from orchestray.platform.comm.backend import BackendKind, apply_nccl_settings
from orchestray.platform.comm.over_host import OverHost
from orchestray.platform.process.pulse import PULSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

CONNECT_TIMEOUT_S = 30.0
"""Time to connect once all members have come: a member that is gone by then was killed in between."""
COMMUNICATOR_TIMEOUT_S = 120.0
"""Time to make a communicator of NCCL once all members have come: a large one takes some tens of seconds."""
_STDERR = 2
_LOOK_S = 0.5
_AT_ONCE = timedelta(milliseconds=1)
_CLOSING = 1
"""Tag under which nothing is ever sent."""
NAMES_FOR_TORCH: Mapping[BackendKind, str] = {"gloo": "gloo", "over_host": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""Names of the backends for `torch.distributed.init_process_group`."""


def all_arrive(store: Store, size: int, is_off: Callable[[], bool], timeout_s: float = math.inf) -> bool:
    """Wait until every member has come: each calls this once, with a store that only they use.

    Args:
        store: a store or a prefix of one.
        size: number of members.
        is_off: returns True if the meeting is off; called about twice a second.
        timeout_s: time that the members have to come.

    Returns:
        True if all have come; False if `is_off` returned True before.

    Raises:
        RuntimeError: the time is up, or the store is gone.
    """
    deadline_s = time.monotonic() + timeout_s
    if store.add("arrived", 1) == size:
        store.set("complete", "yes")
    while not is_off():
        try:
            with PULSE.waiting():
                store.wait(["complete"], timedelta(seconds=_LOOK_S))
        except DistStoreError:  # not yet
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not all {size} members came within {timeout_s:g} s") from None
            continue
        return True
    return False


@dataclass(frozen=True)
class Backend:
    """The backend of a group, and the GPU of this member if it is NCCL."""

    kind: BackendKind = "gloo"
    device: torch.device | None = None


GLOO = Backend()


def connect(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    connect_timeout_s: float | None = None,
    *,
    backend: Backend = GLOO,
) -> Any:
    """Return a new group that torch's registry of process groups does not know.

    Args:
        store: store through which the members meet.
        rank: rank of this member.
        size: number of members.
        timeout_s: timeout of an operation.
        connect_timeout_s: timeout of this meeting; default: the same.
        backend: backend of all members.
    """
    group = _connect(store, rank, size, timedelta(seconds=connect_timeout_s or timeout_s), backend)
    if connect_timeout_s is not None:
        group.set_timeout(timedelta(seconds=timeout_s))
    return group


def _connect(store: Store, rank: int, size: int, timeout: timedelta, backend: Backend) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    if backend.kind == "over_host":
        return OverHost(gloo)
    if backend.kind == "gloo":
        return gloo
    apply_nccl_settings(os.environ)
    both: Any = dist.ProcessGroup(store, rank, size)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    kinds: Any = dist.ProcessGroup.BackendType
    both._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    on_gpu = nccl(PrefixStore("on-gpus", store), rank, size, options)
    both._register_backend(torch.device("cuda"), kinds.NCCL, on_gpu)
    # The communicator is made now, while all members are here. Otherwise the first operation would make it, which may
    # be an exchange of some of them only; and a send alone would make one for each pair.
    both.bound_device_id = backend.device
    with ended_if_late():
        on_gpu.eager_connect_single_device(backend.device)
    return both


@contextlib.contextmanager
def ended_if_late(timeout_s: float = COMMUNICATOR_TIMEOUT_S) -> Iterator[None]:
    """End this process, with its stacks in its output, if the communicator that is made inside is not made in time.

    A member that dies while NCCL makes one leaves the others waiting in it for good. The driver's word does not reach
    them: there is nothing yet to abort, and torch sets no time limit. So a survivor counts as lost: the driver sees
    that the process has ended, and replaces it. The watch needs no lock of Python, which NCCL's call may hold.

    Args:
        timeout_s: time to make it.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=_STDERR)
    try:
        with PULSE.waiting():
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def join_default_group(store: Store, rank: int, size: int, timeout_s: float, backend: Backend = GLOO) -> None:
    """Join this process's default group, together with all members that have come to the store.

    Args:
        store: store that only these members use.
        rank: rank of this member.
        size: number of members.
        timeout_s: timeout of an operation.
        backend: backend of all members.

    Raises:
        RuntimeError: one of them is gone.
    """
    if backend.kind == "nccl":
        apply_nccl_settings(os.environ)
    remember_backend(backend)
    try:
        with ended_if_late() if backend.kind == "nccl" else contextlib.nullcontext():
            dist.init_process_group(
                NAMES_FOR_TORCH[backend.kind],
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
                device_id=backend.device if backend.kind == "nccl" else None,  # its communicator is made now
            )
    except RuntimeError:
        _forget_failed_group()
        raise
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=timeout_s))


_of_default_group = [GLOO]


def remember_backend(backend: Backend) -> None:
    """Note the backend of this process's default group, where others have made it."""
    _of_default_group[0] = backend


def adopt_default_group(backend: Backend) -> None:
    """Use the default group that others have made in this process; all its members call this.

    Args:
        backend: backend that it was made with.
    """
    remember_backend(backend)
    if backend.kind == "nccl":
        group: Any = dist.distributed_c10d._get_default_group()
        group.bound_device_id = backend.device
        with ended_if_late():
            group._get_backend(backend.device).eager_connect_single_device(backend.device)


def backend_of_default_group() -> Backend:
    """Return the backend that this process's default group was made with."""
    return _of_default_group[0]


def _forget_failed_group() -> None:
    """Reset torch's count of groups, which a failed one has raised.

    The count names the next default group. A process with another count than the new member's would look for it in the
    store under another name, and both would wait in vain. The end of any default group resets it.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of operations of a registered group, in seconds."""
    backend: Any = group._get_backend(group._device_types[0])
    return float(backend.options._timeout.total_seconds())


def start_together(
    group: Any, send: Sequence[tuple[int, torch.Tensor]], receive: Sequence[tuple[int, torch.Tensor]]
) -> list[Any]:
    """Start sends and receives as one operation for each device, and return their works.

    A receive of NCCL holds its stream until its send has come. So two ranks that each start a receive and then a send
    wait for each other for ever, and sends first do no better. As one operation (`ncclGroupStart`, `ncclGroupEnd`) all
    run together, and on the communicator of the group instead of one for each pair of ranks. This is what
    `torch.distributed.batch_isend_irecv` does, which takes only groups that torch's registry knows.

    Args:
        group: a process group, or a backend of one.
        send: rank and tensor of each send.
        receive: rank and tensor of each receive.
    """
    works: list[Any] = []
    for device in dict.fromkeys(tensor.device for _, tensor in (*receive, *send)):
        is_whole = isinstance(group, dist.ProcessGroup)
        joins = (group._get_backend(device) if is_whole else group).supports_coalescing
        named = [device] if is_whole else []
        if joins:
            group._start_coalescing(*named)
        here = [group.recv([tensor], peer, 0) for peer, tensor in receive if tensor.device == device]
        here += [group.send([tensor], peer, 0) for peer, tensor in send if tensor.device == device]
        works += [group._end_coalescing(*named)] if joins else here
    return works


def wait_for_stream(device: torch.device | None) -> None:
    """Block this thread, and no other, until the current stream of a GPU has done all that was put on it before."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    event.synchronize()


def disconnect(groups: list[Any]) -> None:
    """Close the connections, and remove the groups from the registries of `torch.distributed`, which keep them alive.

    Every pending operation raises, including those that other threads of this process wait for.
    """
    for group in reversed(groups):  # siblings first: with the default group torch destroys them all
        _hang_up(group)
    with _aborts_of_nccl_together(groups):
        for group in reversed(groups):
            with contextlib.suppress(RuntimeError):
                group.abort()  # ends NCCL's kernels, whose results are then undefined
    for group in reversed(groups):
        known = group.inner if isinstance(group, OverHost) else group
        if dist.is_initialized() and known in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(known)


@contextlib.contextmanager
def _aborts_of_nccl_together(groups: list[Any]) -> Iterator[None]:
    """Make the aborts of several communicators one call: one by one they may wait for each other for ever.

    torch does the same where it aborts all groups (`_abort_process_group`, which does not know ours).
    """
    found = (_on_gpus(group) for group in groups)
    nccl: Any = next((backend for backend in found if backend is not None), None)
    if nccl is None:
        yield
        return
    nccl._group_start()
    try:
        yield
    finally:
        nccl._group_end()


def _on_gpus(group: Any) -> Any:
    """Return the NCCL backend of a group; None: it has none."""
    if not (isinstance(group, dist.ProcessGroup) and dist.is_nccl_available()):
        return None
    with contextlib.suppress(RuntimeError):
        backend = group._get_backend(torch.device("cuda"))
        return backend if isinstance(backend, dist.ProcessGroupNCCL) else None
    return None


def _hang_up(group: Any) -> None:
    if group.size() == 1:
        return
    with contextlib.suppress(RuntimeError):  # the timeout closes gloo's connections, or they were closed before
        group.recv([torch.empty(1, dtype=torch.uint8)], (group.rank() + 1) % group.size(), _CLOSING).wait(_AT_ONCE)
