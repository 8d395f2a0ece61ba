"""SIGKILL or SIGSTOP of one of two ranks in an all-reduce: the survivor lives, meets its successor, sums exactly."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from gpu.check import Place, Verdict, main

_BOUND_S, _BUDGET_S = 5.0, 140.0


def rank(number: int, port: int, backend: str, orders: Any, says: Any) -> None:
    """Sum for ever in the generation that the driver names, and begin another one when it says so."""
    import threading

    import torch
    from torch.distributed import TCPStore

    from gpu import gang
    from orchestray.platform.comm.collective import PeerLostError

    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", number)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    says.put((number, "ready", 0))
    generation = orders.get()
    while generation is not None:
        world = gang.join(TCPStore("127.0.0.1", port), number, 2, backend, device, f"generation-{generation}")
        following: list[Any] = []
        heard = threading.Thread(target=lambda world=world, into=following: (into.append(orders.get()), world.abort()))
        heard.start()  # the driver's word ends what NCCL would wait for without end
        total = torch.ones(2**20, device=device)
        try:
            for step in range(10**9):
                total.fill_(step + number)
                world.all_reduce(total)
                if float(total[-1]) != 2 * step + 1 and not following:
                    says.put((number, "wrong", generation))
                if step == 2:
                    says.put((number, "sums", generation))
        except (PeerLostError, RuntimeError):
            pass
        heard.join()
        generation = following[0]


def run(place: Place) -> Verdict:
    """Kill and stop the second rank in turns, up to fifty times in the time there is."""
    import random

    from torch import multiprocessing
    from torch.distributed import TCPStore

    context: Any = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = "gloo" if place.is_rehearsal else "nccl"
    says = context.Queue()
    alive: list[Any] = []

    def start(number: int) -> tuple[Any, Any]:
        orders = context.Queue()
        process = context.Process(target=rank, args=(number, store.port, backend, orders, says), daemon=True)
        process.start()
        alive.append(process)
        return process, orders

    def hear(word: str, generation: int, number: int = 2) -> None:
        while number:
            who, said, about = says.get(timeout=60)
            if said == "wrong":
                raise RuntimeError(f"rank {who} had a wrong sum in generation {about}")
            number -= (said, about) == (word, generation)

    began_s, times = time.monotonic(), []
    try:
        (survivor, orders), (victim, victims) = start(0), start(1)
        hear("ready", 0, 2)
        orders.put(1), victims.put(1)
        hear("sums", 1)
        for generation in range(2, place.sized(52, 4)):
            spare, spares = start(1)
            hear("ready", 0, 1)
            time.sleep(random.uniform(0.0, 0.1))
            os.kill(victim.pid, signal.SIGSTOP if generation % 2 else signal.SIGKILL)
            killed_s = time.monotonic()
            orders.put(generation), spares.put(generation)
            hear("sums", generation)
            times.append(time.monotonic() - killed_s)
            victim.kill()  # where it was only stopped
            victim, victims = spare, spares
            if time.monotonic() - began_s > _BUDGET_S:
                break
        is_same = survivor.is_alive()
    finally:
        for each in alive:
            each.kill()
    worst = max(times)
    return Verdict(
        is_same and worst <= _BOUND_S,
        f"{len(times)} deaths, longest {worst:.2f} s to the next exact sums (<= {_BOUND_S:g} s), survivor: {is_same}",
    )


if __name__ == "__main__":
    main(run, gpus=2)
