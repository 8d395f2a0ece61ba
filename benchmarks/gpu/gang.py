"""A gang on GPUs without Ray: members as processes that meet in a store, or as threads over gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from gpu.check import Place
from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.thread_group import run_members

TIMEOUT_S = 120.0
Member = Callable[[Collective, torch.device], Any]


def run_gang(
    place: Place,
    size: int,
    member: Member,
    *,
    backend: str = "nccl",
    gpus: int | None = None,
) -> list[Any]:
    """Run a function of a module in every member, and return the results in order.

    Args:
        place: place of the check.
        size: number of members.
        member: gets the member's end of the group and its device; a function of a module, whose result is pickled.
        backend: `nccl`, or `over_host` where members share a GPU.
        gpus: number of GPUs, dealt out in turn; default: one a member.
    """
    if place.has_threads:
        return run_members(size, lambda world: member(world, place.device()))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context: Any = multiprocessing.get_context("spawn")
    if place.is_rehearsal and backend == "nccl":
        backend = "gloo"
    started: list[Any] = []
    answers: dict[Any, int] = {}
    found: dict[int, Any] = {}
    try:
        for rank in range(size):
            answer, end = context.Pipe(duplex=False)
            device = place.device(rank % (gpus or size))
            started.append(context.Process(target=_run, args=(member, rank, size, store.port, backend, device, end)))
            started[-1].start()
            end.close()  # the member has the other copy, so its death ends what is read here
            answers[answer] = rank
        while answers:
            for answer in wait(list(answers)):
                rank = answers.pop(answer)
                found[rank] = _answer(answer, rank)
        for each in started:
            each.join(10)
    finally:
        for each in started:
            if each.is_alive():  # it waits for one that failed
                each.kill()
    return [found[rank] for rank in range(size)]


def _answer(answer: Any, rank: int) -> Any:
    """Return a member's result.

    Raises:
        RuntimeError: it failed, or its process ended without an answer.
    """
    try:
        result, failure = pickle.loads(answer.recv_bytes())  # noqa: S301 - of this program's own processes
    except EOFError:
        raise RuntimeError(f"the process of member {rank} ended without an answer") from None
    if failure is not None:
        raise RuntimeError(failure)
    return result


def _run(member: Member, rank: int, size: int, port: int, backend: str, device: torch.device, answer: Any) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)  # the members of a rehearsal share the cores, and waiting threads would spin
        world = join(TCPStore("127.0.0.1", port), rank, size, backend, device)
        result = member(world, device)
        world.barrier()  # one that leaves before the others have their last answer would cut them off
    except BaseException as error:  # noqa: BLE001 - carried to the parent
        traceback.print_exc()
        answer.send_bytes(pickle.dumps((None, f"{type(error).__name__}: {error}")))
        os._exit(1)  # a member that is left in an operation would not end
    answer.send_bytes(pickle.dumps((result, None)))  # by value: shared memory would be gone with this process
    world.close()


def join(store: Any, rank: int, size: int, backend: str, device: torch.device, name: str = "gang") -> Collective:
    """Join a group by the product's own connection.

    Args:
        store: store in which the members meet.
        rank: rank of this member.
        size: number of members.
        backend: `gloo`, `nccl` or `over_host`.
        device: GPU of this member.
        name: name of the meeting; another for each.
    """
    from orchestray.platform.comm.process_groups import Backend, connect

    chosen: Any = Backend(backend, device)  # type: ignore[arg-type]
    store = PrefixStore(name, store)
    return Collective(connect(store, rank, size, TIMEOUT_S, backend=chosen), store, TIMEOUT_S, backend=chosen)
