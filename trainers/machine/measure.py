"""The measurement of this machine, in processes of its own: `python -m` this module writes a profile.

The process imports torch once and becomes several by forking, before any of its threads has begun. What it says on
stdout is one line for each part that is done.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch.distributed import FileStore

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.machine import kept
from orchestray.trainers.machine.measure_compute import QUICK_SIZES, SIZES, computing, disk_bytes_per_s, reference_s
from orchestray.trainers.machine.measure_group import channel_times, collective_times, contention, overlap
from orchestray.trainers.machine.profile import Links, MachineProfile

GROUPS = (2, 4)
"""Numbers of processes whose collective operations are measured; the first alone if that is to be quick."""
_MOST_AT_ONCE = 8
_TIMEOUT_S = 120.0
_INTER_NODE = "inter_node is the TCP channel within this machine, as measured: put the times of your own network here"


def counts_up_to(cores: int) -> tuple[int, ...]:
    """Return the numbers of threads, or of processes at once, to measure: powers of two, and all cores."""
    return tuple(sorted({1 << power for power in range(cores.bit_length())} | {cores}))


def measure(
    rank: int, num_ranks: int, meeting: str, directory: Path, process_bytes: int, *, quick: bool
) -> MachineProfile | None:
    """Measure this machine as one of several processes; return the profile at rank 0.

    Args:
        rank: rank of this process.
        num_ranks: number of the processes.
        meeting: file through which they meet.
        directory: directory whose disk is measured.
        process_bytes: memory of a worker's process, see `measure_process`.
        quick: True to measure fewer shapes of products, and collective operations of two processes alone.
    """
    torch.set_num_threads(1)
    world = Collective.gloo(FileStore(meeting, num_ranks), rank, num_ranks, _TIMEOUT_S)
    is_first, cores = rank == 0, kept.cores()
    steady_s = [reference_s()] if is_first else []
    computes = {}
    for threads in counts_up_to(cores) if is_first else ():
        computes[threads] = computing(threads, QUICK_SIZES if quick else SIZES)
        steady_s.append(reference_s())
        _say(f"products and copies with {threads} thread{'s' * (threads > 1)}")
    world.barrier()
    contended = contention(world, counts_up_to(min(cores, num_ranks)))
    times = collective_times(world, _groups(quick))
    hidden = overlap(world)
    if is_first:
        _say("collective operations")
    channels = channel_times(world)
    profile = None
    if is_first and times is not None and contended is not None:
        steady_s.append(reference_s())
        disk = disk_bytes_per_s(directory)
        _say("channels and disk")
        profile = MachineProfile(
            name=f"{kept.processor()}, {cores} cores",
            processor=kept.processor(),
            cores=cores,
            memory_bytes=kept.memory_bytes(),
            versions=kept.versions(),
            compute=computes,
            collectives=times,
            contention=contended,
            overlap=hidden,
            channels=channels,
            disk_bytes_per_s=disk,
            links=Links(channels["shared_memory"].fit, channels["tcp"].fit, _INTER_NODE),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            process_bytes=process_bytes,
            spread=max(steady_s) / min(steady_s) - 1,
        )
    world.barrier()
    world.close()
    return profile


def _groups(quick: bool) -> tuple[int, ...]:
    return GROUPS[:1] if quick else GROUPS


def _say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(out: str, meeting: str, directory: str, process_bytes: str, *, quick: bool) -> None:
    """Measure this machine and write its profile to a file; see `measure`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all processes: each ends without a word
    num_ranks = max(*_groups(quick), min(kept.cores(), _MOST_AT_ONCE))
    one = partial(
        measure, num_ranks=num_ranks, meeting=meeting, directory=Path(directory), process_bytes=int(process_bytes),
        quick=quick,
    )  # fmt: skip
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=one, args=(rank,), daemon=True) for rank in range(1, num_ranks)]
    for process in others:
        process.start()
    try:
        profile = one(0)
        assert profile is not None
        Path(out).write_text(json.dumps(profile.to_json()), encoding="utf-8")
    except Exception as error:  # noqa: BLE001 - the caller shows the last line
        for process in others:
            process.kill()
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)  # threads of the group may still run
    for process in others:
        process.join()


if __name__ == "__main__":
    main(*sys.argv[1:5], quick="quick" in sys.argv[5:])
