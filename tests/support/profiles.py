"""Profiles of machines that do not exist, with times by closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.trainers.machine import kept
from orchestray.trainers.machine.gemm import GemmTable, shapes
from orchestray.trainers.machine.profile import Compute, Contention, Links, MachineProfile
from orchestray.trainers.machine.transfers import KINDS, CollectiveTimes, Curve, ring_s

LINK = AlphaBeta(1e-4, 1e-9)
SIZES_BYTES = (1 << 10, 1 << 17, 1 << 20, 1 << 24)
FLOPS_PER_S = 1e11
PROCESS_BYTES = 300 * 10**6


def gemm_table(flops_per_s: float = FLOPS_PER_S, sizes: tuple[int, ...] = (1, 16, 256, 4096)) -> GemmTable:
    """Return the table of a machine with the same speed for every shape."""
    return GemmTable(sizes, tuple(2 * m * n * k / flops_per_s for m, n, k in shapes(sizes)))


def line(link: AlphaBeta) -> Curve:
    """Return the times of messages over a link."""
    return Curve(SIZES_BYTES, tuple(link.time_s(size) for size in SIZES_BYTES))


def profile(**changes: Any) -> MachineProfile:
    """Return a machine of this one's processor, with two cores, and rings over one kind of link."""
    curves = {
        kind: {
            ranks: Curve(SIZES_BYTES, tuple(ring_s(kind, ranks, size, LINK) for size in SIZES_BYTES))
            for ranks in (2, 4)
        }
        for kind in KINDS
    }
    made = MachineProfile(
        name="a machine of closed forms",
        processor=kept.processor(),
        cores=kept.cores(),
        memory_bytes=8 << 30,
        versions=kept.versions(),
        compute={
            threads: Compute(
                {"float32": gemm_table(threads * FLOPS_PER_S), "bfloat16": gemm_table(8 * threads * FLOPS_PER_S)},
                threads * 1e10,
                1e-6,
            )
            for threads in (1, 2)
        },
        collectives=CollectiveTimes(curves),
        contention=Contention({1: 1.0, 2: 1.5}, {1: 1.0, 2: 2.0}),
        overlap=0.25,
        channels={"tcp": line(LINK), "shared_memory": line(AlphaBeta(5e-5, 2e-10))},
        disk_bytes_per_s=5e8,
        process_bytes=PROCESS_BYTES,
        links=Links(AlphaBeta(5e-5, 2e-10), LINK, "by hand"),
        measured_at="2026-01-01T00:00:00+00:00",
        spread=0.02,
    )
    return replace(made, **changes)
