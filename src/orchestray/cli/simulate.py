"""`orchestray simulate`: steps of training by thousands of workers, in virtual time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestray.cli.options import Json
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.files import dump_json
from orchestray.platform.terminal.format import number
from orchestray.platform.terminal.tables import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from orchestray.platform.comm.allreduce.costs import AlphaBeta
    from orchestray.trainers.survey.cluster.schemes import Result, Setting

app = typer.Typer()

_LINK_OPTIONS = ("latency_us", "gbit_s", "near_latency_us", "near_gbit_s")
_CLUSTER, _LOAD, _WRONG, _SCHEMES = "Cluster", "Load", "What goes wrong", "Schemes"
_EPILOG = """Examples:

orchestray simulate --workers 1024 --per-node 8 --mb 100 --compute-ms 200

orchestray simulate ring async --workers 256 --slow-steps 0.01 --slow-factor 5
"""


@app.command(epilog=_EPILOG)
def simulate(
    context: typer.Context,
    schemes: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCHEME", help="Schemes to compare; default: all.", show_default=False),
    ] = None,
    *,
    workers: Annotated[int, typer.Option(min=1, max=1_000_000, help="Workers.", rich_help_panel=_CLUSTER)] = 64,
    per_node: Annotated[
        int, typer.Option(min=0, help="Workers of a node; 0: all on one.", rich_help_panel=_CLUSTER)
    ] = 8,
    latency_us: Annotated[float, typer.Option(min=0, help="Latency between nodes.", rich_help_panel=_CLUSTER)] = 30.0,
    gbit_s: Annotated[
        float, typer.Option(min=1e-6, help="Bandwidth of a node's port to the others.", rich_help_panel=_CLUSTER)
    ] = 100.0,
    near_latency_us: Annotated[
        float, typer.Option(min=0, help="Latency within a node.", rich_help_panel=_CLUSTER)
    ] = 5.0,
    near_gbit_s: Annotated[
        float, typer.Option(min=1e-6, help="Bandwidth of a worker within a node.", rich_help_panel=_CLUSTER)
    ] = 800.0,
    machine: Annotated[
        Path | None,
        typer.Option(
            help="Profile of a machine (orchestray calibrate), whose links take the place of these.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    placement: Annotated[
        str,
        typer.Option(
            help="Nodes of the workers: packed (neighbours share a node), scattered, random.", rich_help_panel=_CLUSTER
        ),
    ] = "packed",
    ports: Annotated[
        str, typer.Option(help="Port to other nodes: one a node, or one a worker.", rich_help_panel=_CLUSTER)
    ] = "node",
    mb: Annotated[float, typer.Option(min=0, help="Size of the gradient, MB.", rich_help_panel=_LOAD)] = 100.0,
    compute_ms: Annotated[
        float, typer.Option(min=0, help="A worker's computation of a step.", rich_help_panel=_LOAD)
    ] = 200.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps to simulate.", rich_help_panel=_LOAD)] = 50,
    speed_spread: Annotated[
        float, typer.Option(min=0, help="Spread of the workers' speeds; 0.1: a tenth.", rich_help_panel=_WRONG)
    ] = 0.0,
    slow_steps: Annotated[
        float, typer.Option(min=0, max=1, help="Part of a worker's steps that is slow.", rich_help_panel=_WRONG)
    ] = 0.0,
    slow_factor: Annotated[
        float, typer.Option(min=1, help="How many times as long those take.", rich_help_panel=_WRONG)
    ] = 5.0,
    mtbf_hours: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="Mean time between failures of a worker; default: none fails.", rich_help_panel=_WRONG
        ),
    ] = None,
    checkpoint_s: Annotated[
        float, typer.Option(min=0, help="Time of saving a checkpoint.", rich_help_panel=_WRONG)
    ] = 10.0,
    restart_s: Annotated[
        float, typer.Option(min=0, help="Time from a failure until work goes on.", rich_help_panel=_WRONG)
    ] = 60.0,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between checkpoints; default: Young and Daly's.", rich_help_panel=_WRONG),
    ] = None,
    bound: Annotated[
        int, typer.Option(min=0, help="stale: steps that a worker may be ahead.", rich_help_panel=_SCHEMES)
    ] = 3,
    servers: Annotated[int, typer.Option(min=1, help="server, stale, async: servers.", rich_help_panel=_SCHEMES)] = 1,
    local_steps: Annotated[
        int, typer.Option(min=1, help="local: steps between averages.", rich_help_panel=_SCHEMES)
    ] = 8,
    schedule: Annotated[str, typer.Option(help="pipeline: its schedule.", rich_help_panel=_SCHEMES)] = "1f1b",
    stages: Annotated[int, typer.Option(min=1, help="pipeline: workers of one.", rich_help_panel=_SCHEMES)] = 4,
    microbatches: Annotated[
        int, typer.Option(min=1, help="pipeline: micro-batches of a step.", rich_help_panel=_SCHEMES)
    ] = 16,
    activations_mb: Annotated[
        float,
        typer.Option(min=0, help="pipeline: MB between stages for a worker's samples.", rich_help_panel=_SCHEMES),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Simulate steps of training by many workers in virtual time, with stragglers and failures."""
    import numpy as np  # late, as all of these: they are slow to load

    from orchestray.platform.comm.allreduce.costs import AlphaBeta
    from orchestray.trainers.survey.cluster.failures import Failures
    from orchestray.trainers.survey.cluster.network import PLACEMENTS, Network
    from orchestray.trainers.survey.cluster.schemes import SCHEMES, Options, Setting, simulate
    from orchestray.trainers.survey.cluster.stragglers import Compute

    problems = [
        f"there is no scheme {name!r}: choose of {', '.join(SCHEMES)}" for name in schemes or () if name not in SCHEMES
    ]
    if placement not in PLACEMENTS:
        problems.append(f"--placement: must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
    if ports not in ("node", "worker"):
        problems.append(f"--ports: must be node or worker, got {ports!r}")
    if problems:
        raise ConfigError(problems)
    near, far = (
        AlphaBeta(us * 1e-6, 8e-9 / gbit) for us, gbit in ((near_latency_us, near_gbit_s), (latency_us, gbit_s))
    )
    if machine is not None:
        near, far = _links(machine, context)
    setting = Setting(
        Network(workers, near, far, per_node, placement, ports == "node", seed),  # type: ignore[arg-type]
        mb * 1e6,
        Compute(compute_ms * 1e-3, speed_spread, slow_steps, slow_factor, seed),
        steps,
        Failures(1 / (mtbf_hours * 3600) if mtbf_hours else 0.0, checkpoint_s, restart_s),
        checkpoint_every,
        Options(bound, servers, local_steps, schedule, stages, microbatches, activations_mb * 1e6),
        seed,
    )
    results, skipped = [], {}
    for name in schemes or SCHEMES:
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is refused below
                results.append(simulate(name, setting))
        except ValueError as error:
            if schemes:
                raise ConfigError(f"{name}: {error}") from None
            skipped[name] = str(error)
        except MemoryError:
            raise ConfigError(
                f"{name}: {workers:,} workers and {steps:,} steps need more memory than there is"
            ) from None
    endless = [each.scheme for each in results if not math.isfinite(1e3 * each.step_s + each.far_bytes)]
    if endless:
        raise ConfigError(f"{endless[0]}: a step takes longer than numbers reach; give a smaller load or faster links")
    results.sort(key=lambda result: result.useful_step_s)
    if as_json:
        print(dump_json({"schemes": [result.to_json() for result in results], "skipped": skipped}))
        return
    show(_table(results, setting))
    for name, reason in skipped.items():
        print(f"Not {name}: {reason}.")


def _links(machine: Path, context: typer.Context) -> tuple[AlphaBeta, AlphaBeta]:
    """Return the links of a profile, within a node and between two."""
    from orchestray.trainers.machine import kept

    sources = {name: context.get_parameter_source(name) for name in _LINK_OPTIONS}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"--machine: the profile has the links already; leave out {options}, or edit its links")
    links = kept.load(machine, of_any_machine=True).links
    return links.intra_node, links.inter_node


def _table(results: Sequence[Result], setting: Setting) -> RenderableType:
    from rich.table import Table

    fails = setting.failures.rate_per_s > 0 or setting.checkpoint_every is not None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("scheme", no_wrap=True)
    columns = [
        "step, ms",
        "waits",
        "stale",
        "near MB",
        "far MB",
        *(["goodput", "saves", "useful, ms"] if fails else []),
    ]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    nodes, workers = setting.network.num_nodes, setting.network.num_workers
    for result in results:
        cells = [
            number(result.step_s * 1e3),
            f"{max(0.0, 1 - result.compute_s / result.step_s):.0%}" if result.step_s else "",
            f"{result.staleness:.3g}" if result.staleness else "0",
            number(result.near_bytes / workers / 1e6),
            number(result.far_bytes / nodes / 1e6),
        ]
        if fails:
            every = f"{result.checkpoint_every:,}" if result.checkpoint_every else "-"
            useful = number(result.useful_step_s * 1e3) if result.goodput else "never"
            cells += [f"{result.goodput:.2%}", every, useful]
        table.add_row(result.scheme, *cells)
    return table
