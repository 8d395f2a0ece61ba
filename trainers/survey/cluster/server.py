"""A parameter server in virtual time: synchronous, stale-synchronous or asynchronous.

Each worker computes, pushes its gradient, and goes on when it has pulled. A server's ports take in one message at a
time, and send one at a time; sharded over k servers, each message occupies a port for 1/k of its time. With a bound s a
worker gets its pull when it is at most s steps ahead of the slowest. 0 is the synchronous server, none the asynchronous
one. See Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013). All
workers take their steps from one pool, so a fast one does more of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestray.platform.comm.allreduce.costs import AlphaBeta


@dataclass(frozen=True)
class Served:
    """The result of a simulation."""

    finish_s: float
    """Time at which the last worker has its last pull."""
    staleness: NDArray[np.int64]
    """Updates by others between the pull that each gradient was computed on and its own update, in their order."""
    most_ahead: int
    """Most steps that a worker was ahead of the slowest when it began one."""


def parameter_server(
    compute_s: NDArray[np.float64], num_bytes: float, link: AlphaBeta, *, bound: int | None = None, num_servers: int = 1
) -> Served:
    """Simulate a server until the workers together have done all steps.

    Args:
        compute_s: seconds of each step of each worker, [num_steps, num_workers]; a worker that does more steps than
            that begins at the first row again.
        num_bytes: bytes of a gradient, and of the parameters.
        link: time of a message between a worker and the server.
        bound: most steps that a worker may be ahead of the slowest; None: any number.
        num_servers: servers that the parameters are sharded over.
    """
    num_steps, num_workers = compute_s.shape
    seconds = compute_s.T.tolist()
    transfer_s = num_bytes * link.beta_s_per_byte
    port_s, alpha_s = transfer_s / num_servers, link.alpha_s
    pool = num_steps * num_workers
    steps_done, pulled = [0] * num_workers, [0] * num_workers
    at_step, slowest = Counter({0: num_workers}), 0
    waiting: dict[int, list[int]] = {}
    in_free_s = out_free_s = finish_s = 0.0
    num_updates, most_ahead = 0, 0
    staleness: list[int] = []
    # Heads of pushes that are on their way, by the time at which they reach the server.
    pushes = [(seconds[worker][0] + alpha_s, worker) for worker in range(num_workers)]
    num_begun = num_workers
    heapq.heapify(pushes)
    while pushes:
        head_s, worker = heapq.heappop(pushes)
        in_free_s = max(in_free_s, head_s) + port_s
        taken_s = max(in_free_s, head_s + transfer_s)
        staleness.append(num_updates - pulled[worker])
        num_updates += 1
        clock = steps_done[worker]
        steps_done[worker] = clock + 1
        at_step[clock] -= 1
        at_step[clock + 1] += 1
        released = [worker]
        if bound is not None:
            waiting.setdefault(clock + 1, []).append(worker)
            released = waiting.pop(clock + 1) if clock + 1 <= slowest + bound else []
        while not at_step[slowest]:
            del at_step[slowest]
            slowest += 1
            if bound is not None:
                released += waiting.pop(slowest + bound, [])
        for each in released:
            begins_s = max(taken_s, out_free_s)
            out_free_s = begins_s + port_s
            has_s = begins_s + alpha_s + transfer_s
            finish_s = max(finish_s, has_s)
            pulled[each] = num_updates
            if num_begun < pool:
                num_begun += 1
                most_ahead = max(most_ahead, steps_done[each] - slowest)
                row = seconds[each]
                heapq.heappush(pushes, (has_s + row[steps_done[each] % num_steps] + alpha_s, each))
    return Served(finish_s, np.asarray(staleness), most_ahead)


def parameter_server_s(
    num_steps: int, num_workers: int, compute_s: float, num_bytes: float, link: AlphaBeta, num_servers: int = 1
) -> float:
    """Return the seconds of an asynchronous server whose workers all compute alike.

    C = compute + 2 alpha + 2 T is the step of a single worker. A message occupies a port for T/k. The last worker is W
    - 1 messages behind the first. From then on a step takes W T/k or C, whichever is longer.
    """
    transfer_s = num_bytes * link.beta_s_per_byte
    port_s, alone_s = transfer_s / num_servers, compute_s + 2 * link.alpha_s + 2 * transfer_s
    return alone_s + (num_workers - 1) * port_s + (num_steps - 1) * max(num_workers * port_s, alone_s)


def synchronous_server_s(
    num_steps: int, num_workers: int, compute_s: float, num_bytes: float, link: AlphaBeta, num_servers: int = 1
) -> float:
    """Return the seconds of a synchronous server whose workers all compute alike.

    All pushes of the first step come at once, and the last is in after max(W T/k, T). From then on the pulls leave, and
    the next pushes come, T/k apart: a step takes C + (W - 1) T/k. The last pull leaves (W - 1) T/k after the first.
    """
    transfer_s = num_bytes * link.beta_s_per_byte
    port_s, alone_s = transfer_s / num_servers, compute_s + 2 * link.alpha_s + 2 * transfer_s
    behind_s = (num_workers - 1) * port_s
    first_s = alone_s + max(num_workers * port_s - transfer_s, 0.0)
    return first_s + (num_steps - 1) * (alone_s + behind_s) + behind_s
