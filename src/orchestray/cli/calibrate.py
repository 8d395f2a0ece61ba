"""`orchestray calibrate`: how fast this machine computes, copies, sends and writes, measured once and kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestray.cli.options import Json
from orchestray.platform.run.files import dump_json
from orchestray.platform.terminal.format import number
from orchestray.platform.terminal.tables import show

if TYPE_CHECKING:
    from rich.table import Table

    from orchestray.platform.comm.allreduce.costs import AlphaBeta
    from orchestray.trainers.machine.profile import MachineProfile

app = typer.Typer()


@app.command(epilog="Example: orchestray calibrate")
def calibrate(
    *,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Where to keep the numbers; default: this machine's own place."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure fewer shapes and processes, in a third of the time.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Keep them even if the machine is busy.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine for half a minute, and keep what predictions of training times need to know of it."""
    from orchestray.trainers.driver.engines.driver import HOST
    from orchestray.trainers.machine import calibrate as calibration
    from orchestray.trainers.machine import kept

    file = profile or kept.default_file()
    kept.check_place(file)
    if not force:
        calibration.check_quiet()
    found = calibration.calibrate(HOST, say=_say, quick=quick)
    if not force:
        calibration.check_steady(found)
    kept.save(found, file)
    if as_json:
        print(dump_json(found.to_json()))
        return
    print(f"{found.name}, {found.memory_bytes / 1e9:.3g} GB of memory, torch {found.versions['torch']}\n")
    show(_compute(found))
    print()
    show(_transfers(found))
    for line in ("", *_lines(found), _rdma(), f"Kept in {file}."):
        print(line)


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(f"  measured: {line}", file=sys.stderr)


def _compute(profile: MachineProfile) -> Table:
    table = _table("one process alone", *(f"{count} thread{'s' * (count > 1)}" for count in profile.compute))
    each = profile.compute.values()
    for dtype in next(iter(each)).gemm:
        table.add_row(f"products, {dtype}, GFLOP/s", *(number(one.gemm[dtype].peak_flops_per_s / 1e9) for one in each))
    table.add_row("copies, GB/s", *(f"{one.copy_bytes_per_s / 1e9:.3g}" for one in each))
    table.add_row("one small operation, us", *(f"{one.small_op_s * 1e6:.3g}" for one in each))
    return table


_CHANNELS = {"tcp": "message, TCP", "shared_memory": "message, memory"}
_SHOWN_BYTES = {"1 kB, us": 1 << 10, "1 MB, us": 1 << 20, "16 MB, us": 1 << 24}


def _transfers(profile: MachineProfile) -> Table:
    table = _table("operation", "ranks", "alpha, us", "1/beta, GB/s", *_SHOWN_BYTES)
    for kind, by_ranks in profile.collectives.curves.items():
        for ranks, curve in by_ranks.items():
            times = (number(curve.seconds(size) * 1e6) for size in _SHOWN_BYTES.values())
            table.add_row(kind.replace("_", "-"), str(ranks), *_fitted(curve.fit), *times)
    for channel, curve in profile.channels.items():
        times = (number(curve.seconds(size) * 1e6) for size in _SHOWN_BYTES.values())
        table.add_row(_CHANNELS.get(channel, channel), "2", *_fitted(curve.fit), *times)
    return table


def _fitted(fit: AlphaBeta) -> tuple[str, str]:
    rate = 1 / fit.beta_s_per_byte / 1e9 if fit.beta_s_per_byte else float("inf")
    return number(fit.alpha_s * 1e6), f"{rate:.3g}"


def _lines(profile: MachineProfile) -> list[str]:
    most = max(profile.contention.products)
    slower = [f"{each[most]:.2f} x for {name}" for name, each in vars(profile.contention).items()]
    return [
        f"Time of {most} processes at once over that of one: {slower[0]}, {slower[1]}.",
        f"Part of an all-reduce that a computation hides: {profile.overlap:.0%}.",
        f"A worker's process has {profile.process_bytes / 1e6:.0f} MB before it builds anything.",
        f"A file gets {number(profile.disk_bytes_per_s / 1e6)} MB/s until it is on the disk.",
        f"Repeats of one product are up to {profile.spread:.0%} apart.",
    ]


def _rdma() -> str:
    from orchestray.trainers.machine.rdma import rdma_devices

    devices = rdma_devices()
    there = f"RDMA: {', '.join(devices)}, which nothing here uses" if devices else "RDMA: no device for it here"
    return f"{there}. Messages go over TCP, or through memory where both ends share it."


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    return table
