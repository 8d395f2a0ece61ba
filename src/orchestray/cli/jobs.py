"""`orchestray jobs`: the submitted jobs of a cluster."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestray.cli.options import Json

if TYPE_CHECKING:
    from orchestray.platform.jobs.submit import Job

app = typer.Typer(
    no_args_is_help=True,
    help="The submitted jobs: list them, read their logs, stop them.",
    epilog="Example: orchestray jobs logs --follow raysubmit_b8Z3hXUwLk4nHq2M",
)

_Address = Annotated[
    str | None,
    typer.Option("--address", metavar="URL", help="The cluster's dashboard; default: $RAY_API_SERVER_ADDRESS."),
]
_Id = Annotated[str, typer.Argument(metavar="ID", help="The id of the job.", show_default=False)]
_COLOURS = {"succeeded": "green", "failed": "red", "running": "cyan", "pending": "yellow", "stopped": "magenta"}


@app.command("list", epilog="Example: orchestray jobs list --address http://127.0.0.1:8265")
def list_jobs(*, address: _Address = None, as_json: Json = False) -> None:
    """List the jobs, the latest first."""
    from orchestray.platform.jobs.submit import JobServer

    jobs = JobServer(address).jobs()
    if as_json:
        print(json.dumps([dataclasses.asdict(job) for job in jobs]))
    else:
        _print_table(jobs)


@app.command(epilog="Example: orchestray jobs logs --follow raysubmit_4LamXRuQpYdSMg7J")
def logs(
    job_id: _Id,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until the job ends, and exit with its command's exit status.")
    ] = False,
    address: _Address = None,
) -> None:
    """Print the log of a job."""
    from orchestray.cli.submit import show_until_end
    from orchestray.platform.jobs.submit import JobServer

    server = JobServer(address)
    job = server.job(job_id)
    if follow:
        raise typer.Exit(show_until_end(server, job.id))
    sys.stdout.write(server.logs(job.id))


@app.command(epilog="Example: orchestray jobs stop raysubmit_4LamXRuQpYdSMg7J")
def stop(job_id: _Id, *, address: _Address = None) -> None:
    """Stop a job as Ctrl-C would, and wait until it has ended: a training saves a checkpoint."""
    from orchestray.platform.jobs.submit import JobServer

    server = JobServer(address)
    job = server.job(job_id)
    if job.ended:
        print(f"Job {job.id} has {_ending(job)} already; there is nothing to stop.")
        return
    print(f"Job {job.id} has {_ending(server.stop(job.id))}.")


def _ending(job: Job) -> str:
    return "been stopped" if job.status == "stopped" else job.status


def _print_table(jobs: list[Job]) -> None:
    from rich.table import Table
    from rich.text import Text

    from orchestray.platform.terminal.tables import show

    if not jobs:
        print("No job was submitted to this cluster.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    table.add_column("job", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("exit", justify="right")
    table.add_column("started", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("command", no_wrap=True, overflow="ellipsis", ratio=1)  # the width that the others leave
    for job in jobs:
        table.add_row(
            Text(job.id),
            Text(job.status, style=_COLOURS.get(job.status, "")),
            "" if job.exit_status is None else str(job.exit_status),
            "" if job.started_at_s is None else time.strftime("%m-%d %H:%M", time.localtime(job.started_at_s)),
            "" if job.seconds is None else _duration(job.seconds),
            Text(" ".join(job.command.split())),  # jobs submitted by others may be whole scripts
        )
    show(table)


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
