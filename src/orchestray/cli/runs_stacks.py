"""`orchestray runs stacks`: where the processes of a live run are in their code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestray.cli.ending import leave_cluster
from orchestray.cli.options import DEFAULT_RUNS_DIR, Json, RunsDir

if TYPE_CHECKING:
    from collections.abc import Sequence

EPILOG = """Examples:

orchestray runs stacks digits

orchestray runs stacks digits --address 10.0.0.1:6379
"""


def stacks_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The run's name, or its directory.", show_default=False)],
    *,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="ADDR",
            help="The Ray cluster of the run, to read its processes on other machines; default: RAY_ADDRESS.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the Python stacks of all processes of a live run, which it does not disturb.

    They are read by py-spy. Where the system forbids that (ptrace), a sentence says so.
    """
    from orchestray.platform.errors import OrchestrayError
    from orchestray.platform.run.directory import RunPaths, writer_of
    from orchestray.platform.run.files import dump_json, load_json
    from orchestray.trainers.saved.run import load_run

    run = load_run(name if "/" in name else runs_dir / name)
    if run.status != "running":
        raise OrchestrayError(
            f"Run '{run.name}' has no processes whose stacks could be read: its status is {run.status}."
        )
    paths = RunPaths(run.path)
    processes: list[dict[str, Any]] = load_json(paths.actors) if paths.actors.exists() else []
    if (driver := writer_of(run.path)) is not None:
        processes = [{"role": "driver", "rank": 0, "pid": driver, "node": "here"}, *processes]
    found = _stacks(processes, address)
    if as_json:
        print(dump_json([{**process, "stacks": text} for process, text in zip(processes, found, strict=True)]))
        return
    for process, text in zip(processes, found, strict=True):
        role = str(process["role"]).replace("_", " ")
        print(f"== {role} {process['rank']} (process {process['pid']}, node {process['node']})\n{text.rstrip()}\n")


def _stacks(processes: Sequence[dict[str, Any]], address: str | None) -> list[str]:
    """Return the stacks of each process: read here, or on its own node if there is a way to that."""
    import os
    from concurrent.futures import ThreadPoolExecutor

    is_here = [_is_here(process) for process in processes]
    with ThreadPoolExecutor(max_workers=8) as threads:
        texts = list(threads.map(_read_here, [each for each, own in zip(processes, is_here, strict=True) if own]))
    others = [process for process, own in zip(processes, is_here, strict=True) if not own]
    address = address or os.environ.get("RAY_ADDRESS")
    if others and address:
        elsewhere = _read_elsewhere(others, address)
    else:
        elsewhere = [
            f"It runs on {each['node']}: run this command there, or give the Ray cluster of the run with --address.\n"
            for each in others
        ]
    read, told = iter(texts), iter(elsewhere)
    return [next(read) if own else next(told) for own in is_here]


def _read_elsewhere(processes: Sequence[dict[str, Any]], address: str) -> list[str]:
    from orchestray.platform.cluster.cluster import connect

    try:
        connect(address)
        from orchestray.platform.actors.member import Identity
        from orchestray.platform.actors.stacks import stacks_of

        return stacks_of([Identity(process["pid"], process["node"]) for process in processes])
    finally:
        leave_cluster()


def _is_here(process: dict[str, Any]) -> bool:
    """Return True if a process runs on this machine."""
    import psutil

    addresses = {each.address for entries in psutil.net_if_addrs().values() for each in entries}
    return process["role"] == "driver" or process["node"] in addresses


def _read_here(process: dict[str, Any]) -> str:
    from orchestray.platform.process.stacks import read_stacks

    try:
        is_worker = Path(f"/proc/{process['pid']}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        is_worker = False
    if process["role"] != "driver" and not is_worker:
        return "It has ended.\n"
    return read_stacks(process["pid"])
