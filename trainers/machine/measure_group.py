"""Measurements of several processes of one machine: collective operations, contention, overlap, channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from time import perf_counter

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from orchestray.platform.comm.channel.base import Channel
from orchestray.platform.comm.channel.gloo import GlooChannel
from orchestray.platform.comm.channel.nearest import open_channel
from orchestray.platform.comm.collective import Collective
from orchestray.trainers.machine.profile import Contention
from orchestray.trainers.machine.transfers import KINDS, CollectiveTimes, Curve, Kind

SIZES_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_REPEATS = (40, 30, 20, 15, 9, 5, 3)
"""Repeats of each size."""
_PRODUCT, _COPIED = 256, 4 << 20
_BLOCK_S = 0.15
_BLOCK_PRODUCTS = 4
_LEAST_BLOCKS = 10
_LEAST_S = 1e-5
_OVERLAPPED_BYTES = 4 << 20


def collective_times(world: Collective, sizes_of_groups: tuple[int, ...]) -> CollectiveTimes | None:
    """Measure every kind of collective operation among the first ranks of a group; every rank calls this.

    Returns:
        The times at rank 0, None at the others; so do the functions below.
    """
    curves: dict[str, dict[int, Curve]] = {kind: {} for kind in KINDS}
    a = torch.ones(_PRODUCT, _PRODUCT)

    def block() -> None:
        _repeat(a, _BLOCK_PRODUCTS)

    for size in sizes_of_groups:
        if world.rank < size:
            group = world.subgroup(f"first {size}", range(size))
            runs = [(_operation(group, kind, num_bytes), repeats) for kind in KINDS for num_bytes, repeats in _POINTS]
            times_s = _between_blocks_s(group, runs, block)
            for place, kind in enumerate(KINDS):
                measured_s = times_s[place * len(_POINTS) : (place + 1) * len(_POINTS)]
                curves[kind][size] = Curve(SIZES_BYTES, _rising(measured_s))
        world.barrier()
    return CollectiveTimes(curves) if world.rank == 0 else None


def _rising(times_s: Sequence[float]) -> tuple[float, ...]:
    """Return the times that are nearest to those measured and do not fall with the bytes."""
    weights = [max(repeats, _LEAST_BLOCKS) for _, repeats in _POINTS]
    return tuple(float(each) for each in isotonic_regression(times_s, weights=weights).x)


_POINTS = tuple(zip(SIZES_BYTES, _REPEATS, strict=True))


def _operation(group: Collective, kind: Kind, num_bytes: int) -> Callable[[], None]:
    whole = torch.zeros(num_bytes // 4)
    part = torch.zeros(whole.numel() // group.size)
    partner = group.rank ^ 1
    run: Mapping[Kind, Callable[[], None]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "reduce_scatter": lambda: group.start_reduce_scatter(part, whole).wait(),
        "all_gather": lambda: group.start_all_gather(whole, part).wait(),
        "broadcast": lambda: group.broadcast(whole, 0),
        "exchange": lambda: group.start_exchange({partner: whole}, {partner: received}).wait(),
    }
    received = torch.zeros_like(whole)
    return run[kind]


def _between_blocks_s(
    group: Collective, runs: Sequence[tuple[Callable[[], None], int]], block: Callable[[], None]
) -> list[float]:
    """Return what each operation adds to a block of computation before it, on the rank to which it adds most.

    Ranks that compute in between arrive at different times, with their threads asleep, as in a step of training: an
    operation takes several times as long as one after the other does. The operations take turns, so that what else the
    machine does for a while falls on all of them.

    Args:
        group: the ranks.
        runs: operations, each with its repeats.
        block: the computation.
    """
    for run, _ in runs:
        run()
    alone_s: list[list[float]] = [[] for _ in runs]
    both_s: list[list[float]] = [[] for _ in runs]
    counts = [max(repeats, _LEAST_BLOCKS) for _, repeats in runs]
    for turn in range(max(counts)):
        for place, (run, _) in enumerate(runs):
            if turn >= counts[place]:
                continue
            began_s = perf_counter()
            block()
            alone_s[place].append(perf_counter() - began_s)
            run()
            both_s[place].append(perf_counter() - began_s)
    added_s = [_middle(both) - _middle(alone) for both, alone in zip(both_s, alone_s, strict=True)]
    added = torch.tensor(added_s, dtype=torch.float64).clamp(min=_LEAST_S)
    group.all_reduce(added, "max")
    return [float(each) for each in added]


def _slowest_s(group: Collective, run: Callable[[], None], repeats: int) -> float:
    """Return the median over repeats of the time of the slowest rank; all begin at the same time."""
    run()
    times_s = torch.zeros(repeats, dtype=torch.float64)
    for number in range(repeats):
        group.barrier()
        times_s[number] = _timed_s(run)
    group.all_reduce(times_s, "max")
    return float(times_s.median())


def _timed_s(call: Callable[[], object]) -> float:
    began_s = perf_counter()
    call()
    return perf_counter() - began_s


def _middle(times_s: list[float]) -> float:
    """Return the mean without the tenth that is lowest and the tenth that is highest."""
    cut = len(times_s) // 10
    return fmean(sorted(times_s)[cut : len(times_s) - cut])


def contention(world: Collective, counts: tuple[int, ...]) -> Contention | None:
    """Measure how much slower processes of one thread get when more of them compute; every rank calls this."""
    a, source = torch.ones(_PRODUCT, _PRODUCT), torch.ones(_COPIED)
    target = torch.empty_like(source)
    slowdowns: list[dict[int, float]] = []
    for block in (lambda: a @ a, lambda: target.copy_(source)):
        taken_s: dict[int, float] = {}
        for count in counts:
            if world.rank < count:
                group = world.subgroup(f"first {count}", range(count))
                taken_s[count] = _together_s(group, block)
            world.barrier()
        slowdowns.append({count: max(1.0, time_s / taken_s[1]) for count, time_s in taken_s.items() if 1 in taken_s})
    return Contention(*slowdowns) if world.rank == 0 else None


def _together_s(group: Collective, block: Callable[[], Tensor]) -> float:
    """Return the mean over ranks of the median time of a block, while all ranks run it."""
    group.barrier()
    times_s, began_s = [], perf_counter()
    while (now_s := perf_counter()) - began_s < _BLOCK_S:
        block()
        times_s.append(perf_counter() - now_s)
    mean = torch.tensor([median(times_s)], dtype=torch.float64)
    group.all_reduce(mean)
    return float(mean / group.size)


def overlap(world: Collective, repeats: int = 7) -> float:
    """Measure the part of an all-reduce that a computation of the same length hides; every rank calls this."""
    hidden = 0.0
    if world.rank < 2:
        group = world.subgroup("first 2", range(2))
        gradient, a = torch.zeros(_OVERLAPPED_BYTES // 4), torch.ones(_PRODUCT, _PRODUCT)
        reduce_s = _slowest_s(group, lambda: group.all_reduce(gradient), repeats)
        one_s = _slowest_s(group, lambda: _repeat(a, 20), repeats) / 20
        products = max(1, round(reduce_s / one_s))

        def both() -> None:
            pending = group.start_all_reduce(gradient)
            _repeat(a, products)
            pending.wait()

        compute_s = _slowest_s(group, lambda: _repeat(a, products), repeats)
        both_s = _slowest_s(group, both, repeats)
        hidden = (reduce_s + compute_s - both_s) / min(reduce_s, compute_s)
    world.barrier()
    return min(1.0, max(0.0, hidden))


def _repeat(a: Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(a, a)


def channel_times(world: Collective) -> dict[str, Curve]:
    """Measure messages between the first two ranks over TCP and through shared memory; every rank calls this.

    A message takes half of the time in which it goes there and comes back.
    """
    curves = {}
    if world.rank < 2:
        ends = {"name": f"rank {world.rank}", "peer": f"rank {1 - world.rank}"}
        opened: dict[str, Callable[[], Channel]] = {
            "tcp": lambda: GlooChannel(world.prefix_store("tcp"), world.rank, **ends),  # type: ignore[arg-type]
            "shared_memory": lambda: open_channel(world.prefix_store("memory"), world.rank, **ends),  # type: ignore[arg-type]
        }
        for name, open_end in opened.items():
            with open_end() as channel:
                curves[name] = Curve(SIZES_BYTES, tuple(_half_s(channel, world.rank, *point) for point in _POINTS))
    world.barrier()
    return curves


def _half_s(channel: Channel, rank: int, num_bytes: int, repeats: int) -> float:
    sent = torch.zeros(num_bytes // 4)
    received = torch.empty_like(sent)
    times_s = []
    for _ in range(repeats + 1):
        began_s = perf_counter()
        if rank == 0:
            channel.send(sent)
            channel.recv(into=received)
        else:
            channel.recv(into=received)
            channel.send(sent)
        times_s.append((perf_counter() - began_s) / 2)
    return median(times_s[1:])
