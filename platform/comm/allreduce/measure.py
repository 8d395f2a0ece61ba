"""Times of messages among the ranks of a live process group, measured and fitted to the alpha-beta model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.platform.comm.allreduce.execute import Scratch, all_reduce
from orchestray.platform.comm.allreduce.schedules import Part, Step
from orchestray.platform.comm.collective import Collective

_SIZES_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20)
HELD_OUT_BYTES = (1 << 12, 1 << 19)
"""Sizes of messages that the fit does not see, to hold its model against."""


@dataclass(frozen=True)
class Fitted:
    """The fitted models, with the same numbers on every rank, so that all ranks choose the same algorithm."""

    message: AlphaBeta
    """Model of a message, while every rank sends one and receives one."""
    native: AlphaBeta
    """Model of a whole all-reduce by the process group itself."""
    held_out_s: Mapping[int, float]
    """Measured seconds of messages of the sizes that are held out, by their bytes."""


def measure(collective: Collective, repeats: int = 5) -> Fitted:
    """Fit both models on rank 0 and broadcast them; every rank must call this (some 10 ms on one machine).

    Some sizes are measured and held out of the fit, which shows its error.

    Messages are timed as in most rounds of a schedule: every rank sends one and receives one, and half of them are
    added.

    Raises:
        PeerLostError: another rank is gone.
    """
    messages_s = [_message_s(collective, num_bytes, repeats) for num_bytes in _SIZES_BYTES]
    natives_s = [_native_s(collective, num_bytes, repeats) for num_bytes in _SIZES_BYTES]
    held_out_s = [_message_s(collective, num_bytes, repeats) for num_bytes in HELD_OUT_BYTES]
    numbers = torch.zeros(4 + len(HELD_OUT_BYTES), dtype=torch.float64)
    if collective.rank == 0:
        fits = [AlphaBeta.fit(_SIZES_BYTES, times_s) for times_s in (messages_s, natives_s)]
        told = [n for fit in fits for n in (fit.alpha_s, fit.beta_s_per_byte)]
        numbers = torch.tensor([*told, *held_out_s], dtype=torch.float64)
    collective.broadcast(numbers, 0)
    alpha_s, beta, native_alpha_s, native_beta, *held_out_s = numbers.tolist()
    held_out = dict(zip(HELD_OUT_BYTES, held_out_s, strict=True))
    return Fitted(AlphaBeta(alpha_s, beta), AlphaBeta(native_alpha_s, native_beta), held_out)


def _message_s(collective: Collective, num_bytes: int, repeats: int) -> float:
    """Time one message from every rank to the next, as the mean of one that is added and one that is copied."""
    tensor, scratch = torch.zeros(num_bytes // 4), Scratch()
    send = Part((collective.rank + 1) % collective.size, 0, tensor.numel())
    receive = Part((collective.rank - 1) % collective.size, 0, tensor.numel())
    rounds = [Step(0, send, receive, "add"), Step(1, send, receive, "copy")]
    return _median_s(lambda: all_reduce(collective, tensor, rounds, scratch), repeats) / len(rounds)


def _native_s(collective: Collective, num_bytes: int, repeats: int) -> float:
    tensor = torch.zeros(num_bytes // 4)
    return _median_s(lambda: collective.all_reduce(tensor), repeats)


def _median_s(action: Callable[[], None], repeats: int) -> float:
    """Return the median of several times; an extra first run opens the connections."""
    action()
    times_s = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)
