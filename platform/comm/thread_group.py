"""Members of a group as threads of one process, over real connections, to measure or test what workers would do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from torch._C._distributed_c10d import HashStore, PrefixStore

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.process import gc_control, torch_threads

Result = TypeVar("Result")
TIMEOUT_S = 600.0


def connected_threads(size: int, timeout_s: float = TIMEOUT_S) -> list[Collective]:
    """Return `size` connected collectives, in rank order, each to be used by one thread."""
    store = HashStore()
    return in_threads(size, lambda rank: Collective.gloo(PrefixStore("threads", store), rank, size, timeout_s))


def run_members(size: int, member: Callable[[Collective], Result], timeout_s: float = TIMEOUT_S) -> list[Result]:
    """Run `member(collective)` in `size` threads, and return the results in rank order.

    A member that raises leaves its group, so the others do not wait for it. Its exception is raised here, before any
    `PeerLostError` that followed from it.
    """
    members = connected_threads(size, timeout_s)

    def run(rank: int) -> Result:
        try:
            return member(members[rank])
        except BaseException:
            members[rank].abort()
            raise

    try:
        return in_threads(size, run)
    finally:
        # At once: gloo takes 10 ms to close a connection, and those of one member one after the other.
        in_threads(size, lambda rank: members[rank].close())


@gc_control.pause()
def in_threads(size: int, body: Callable[[int], Result]) -> list[Result]:
    """Run `body(rank)` in `size` threads; return the results in rank order, or raise what one of them raised.

    No garbage is collected meanwhile: a collection looks into the tensors of all threads. Those may compute without the
    interpreter's lock, and a process has ended with a segmentation fault.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        torch_threads.take_up()
        try:
            results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"replica-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeerLostError))
    return [results[rank] for rank in range(size)]
