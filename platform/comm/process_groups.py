"""Process groups of `torch.distributed`: connecting them, the timeouts of their operations, and ending them.

Facts about gloo that this is built around (torch 2.13):

- Connecting cannot be cancelled, and waits for dead members. So the members check in their store that all have come
  before they connect.
- `abort()` and `shutdown()` close nothing, and a pending wait keeps the connections open. But a receive whose `wait`
  times out closes all connections of its group, and every pending operation raises, here and at the others.
"""

from __future__ import annotations

import contextlib
import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

from orchestray.platform.process.pulse import PULSE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONNECT_TIMEOUT_S = 30.0
"""Time to connect once all members have come: a member that is gone by then was killed in between."""
_LOOK_S = 0.5
_AT_ONCE = timedelta(milliseconds=1)
_CLOSING = 1
"""Tag under which nothing is ever sent."""


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


def connect(store: Store, rank: int, size: int, timeout_s: float, connect_timeout_s: float | None = None) -> Any:
    """Return a new group that torch's registry of process groups does not know: gloo, and NCCL for tensors on GPUs.

    Args:
        store: store through which the members meet.
        rank: rank of this member.
        size: number of members.
        timeout_s: timeout of an operation.
        connect_timeout_s: timeout of this meeting; default: the same.
    """
    group = _connect(store, rank, size, timedelta(seconds=connect_timeout_s or timeout_s))
    if connect_timeout_s is not None:
        group.set_timeout(timedelta(seconds=timeout_s))
    return group


def _connect(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return gloo
    both: Any = dist.ProcessGroup(store, rank, size)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    kinds: Any = dist.ProcessGroup.BackendType
    both._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    both._register_backend(torch.device("cuda"), kinds.NCCL, nccl(PrefixStore("nccl", store), rank, size, options))
    return both


def join_default_group(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Join this process's default group, together with all members that have come to the store.

    Args:
        store: store that only these members use.
        rank: rank of this member.
        size: number of members.
        timeout_s: timeout of an operation.

    Raises:
        RuntimeError: one of them is gone.
    """
    with_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if with_gpus else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
        )
    except RuntimeError:
        _forget_failed_group()
        raise
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=timeout_s))


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


def disconnect(groups: list[Any]) -> None:
    """Close the connections, and remove the groups from the registries of `torch.distributed`, which keep them alive.

    Every pending operation raises, including those that other threads of this process wait for.
    """
    for group in reversed(groups):  # siblings first: with the default group torch destroys them all
        _hang_up(group)
        with contextlib.suppress(RuntimeError):
            group.abort()  # stops NCCL's kernels
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def _hang_up(group: Any) -> None:
    if group.size() == 1:
        return
    with contextlib.suppress(RuntimeError):  # the timeout closes gloo's connections, or they were closed before
        group.recv([torch.empty(1, dtype=torch.uint8)], (group.rank() + 1) % group.size(), _CLOSING).wait(_AT_ONCE)
