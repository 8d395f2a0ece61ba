"""`orchestray runs list|show|compare|average|export|scale|stacks`: the run directories, on the terminal or as JSON."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestray.cli import runs_average, runs_export, runs_scale, runs_stacks
from orchestray.cli.options import DEFAULT_RUNS_DIR, Json, RunsDir
from orchestray.platform.run.files import dump_json
from orchestray.platform.terminal.tables import show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestray.platform.report.timeline import Step
    from orchestray.platform.run.checkpoint_files import Found
    from orchestray.trainers.saved.run import Run, RunSummary

app = typer.Typer(
    epilog="Example: orchestray runs show digits",
    help="The runs there are, and what came of them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("average", epilog=runs_average.EPILOG)(runs_average.average_command)
app.command("export", epilog=runs_export.EPILOG)(runs_export.export_command)
app.command("stacks", epilog=runs_stacks.EPILOG)(runs_stacks.stacks_command)
app.command("scale", epilog=runs_scale.EPILOG)(runs_scale.scale_command)

_STATUS_STYLES = {"succeeded": "green", "running": "cyan", "interrupted": "yellow", "failed": "red", "died": "red"}
_NUM_EVENTS_SHOWN = 12


@app.command("list", epilog="Example: orchestray runs list --runs-dir runs")
def list_command(*, runs_dir: RunsDir = DEFAULT_RUNS_DIR, as_json: Json = False) -> None:
    """List the runs, the newest last."""
    from orchestray.trainers.saved.run import list_runs, list_searches

    runs = list_runs(runs_dir)
    if as_json:
        print(dump_json([_summary_json(run) for run in runs]))
        return
    if runs:
        show(_runs_table(runs))
    else:
        print(f"There are no runs in {runs_dir}.")
    if searches := list_searches(runs_dir):
        print(f"Searches there, for report.html in each or `orchestray dashboard`: {', '.join(searches)}")


@app.command("show", epilog="Example: orchestray runs show digits")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The run's name, or its directory.", show_default=False)],
    *,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="What each worker of a pipeline did and when, in its last step.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="The step of the timeline to draw.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.json", help="Write the timeline for chrome://tracing or Perfetto."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE.png", help="Draw the timeline to a picture.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one run: its config, result, checkpoints, events and loss curve; or its timeline."""
    from orchestray.trainers.saved.run import load_run

    run = load_run(name if "/" in name else runs_dir / name)
    if timeline or step is not None or trace or png:
        _show_timeline(run, number=step, trace=trace, png=png, as_json=as_json, is_drawn=timeline or step is not None)
    elif as_json:
        print(dump_json(_run_json(run)))
    else:
        _show(run)


@app.command("compare", epilog="Example: orchestray runs compare alone digits-pipeline-1f1b")
def compare_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="The runs, or their directories; the first is what the others are compared with.",
            show_default=False,
        ),
    ],
    *,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    as_json: Json = False,
) -> None:
    """Compare the trained weights and the losses of runs: how far they differ, and whether all bits are equal."""
    from orchestray.cli.runs_compare import comparison_table, remarks
    from orchestray.platform.errors import ConfigError
    from orchestray.platform.terminal.tables import show
    from orchestray.trainers.saved.compare import compare_runs
    from orchestray.trainers.saved.run import load_run

    if len(names) < 2:
        raise ConfigError("orchestray runs compare: which other run? For example: orchestray runs compare alone both")
    reference, *others = [load_run(name if "/" in name else runs_dir / name) for name in names]
    found = list(compare_runs(reference, others))
    if as_json:
        print(dump_json({"reference": reference.name, "runs": [each.to_json() for each in found]}))
        return
    show(comparison_table(reference.name, found))
    for remark in remarks(found):
        print(remark)


def _summary_json(run: RunSummary) -> dict[str, Any]:
    return {
        "name": run.name,
        "status": run.status,
        "steps": run.steps,
        "loss": run.loss,
        "validation": dict(run.metrics),
        "seconds": run.seconds,
        "started_at": run.started_at,
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "config": run.config.model_dump(mode="json"),
        "result": run.result or None,
        "checkpoints": [
            {"step": found.step, "bytes": found.num_bytes, "best": is_best} for found, is_best in _checkpoints(run)
        ],
        "events": run.events(),
    }


def _runs_table(runs: list[RunSummary]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from orchestray.platform.terminal.format import duration, metrics_text, number

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("name", overflow="fold")
    table.add_column("status", no_wrap=True)
    for heading in ("steps", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("started", no_wrap=True)
    for run in runs:
        table.add_row(
            Text(run.name),
            Text(run.status, style=_STATUS_STYLES.get(run.status, "")),
            number(run.steps),
            number(run.loss),
            Text(metrics_text(dict([*run.metrics.items()][:1])) or "-"),
            duration(run.seconds),
            _moment(run.started_at),
        )
    return table


def _show(run: Run) -> None:
    from rich.text import Text

    from orchestray.platform.terminal.format import result_rows

    status = run.status
    show(Text.assemble((run.name, "bold"), "  ", (status, _STATUS_STYLES.get(status, "")), f"  {run.path}"))
    if status == "died":
        show(Text("No process writes this run, and it has no result: go on with it by --resume.", style="yellow"))
    _section("Config", _pairs(_config_rows(run)))
    if run.result:
        _section("Result", _pairs(result_rows(run.result)))
    curve = _loss_curve(run)
    if curve:
        _section("Loss of the training data, by step", Text("\n".join(curve)))
    _section("Checkpoints", _pairs(_checkpoint_rows(run)) if run.checkpoints() else Text("  none"))
    events = run.events()
    if events:
        hidden = len(events) - _NUM_EVENTS_SHOWN
        heading = f"Events (the last {_NUM_EVENTS_SHOWN} of {len(events)})" if hidden > 0 else "Events"
        _section(heading, _pairs(map(_event_row, events[-_NUM_EVENTS_SHOWN:])))


def _show_timeline(
    run: Run, *, number: int | None, trace: Path | None, png: Path | None, as_json: bool, is_drawn: bool
) -> None:
    from orchestray.platform.report.timeline import choose, read_timeline, write_trace

    steps = read_timeline(run.path)
    step = choose(steps, number)
    if trace is not None:
        write_trace(steps, run.name, trace)
    if png is not None:
        from orchestray.platform.report.timeline_picture import write_timeline_picture

        write_timeline_picture(step, run.name, png)
    if as_json:
        print(dump_json(_timeline_json(step)))
        return
    if is_drawn:
        _draw_timeline(step)
    for path in filter(None, (trace, png)):
        print(f"Wrote {path}.")


def _timeline_json(step: Step) -> dict[str, Any]:
    return {
        "step": step.step,
        "span_s": step.span_s,
        "bubble": step.bubble,
        "workers": [
            {"rank": row.rank, "stages": row.stages, "busy_s": row.busy_s, "bubble": row.bubble} for row in step.rows
        ],
    }


def _draw_timeline(step: Step) -> None:
    from rich.console import Console

    from orchestray.platform.report.timeline_text import draw

    console = Console(highlight=False)
    width = max(console.width, 60) if console.is_terminal else 80
    for line in draw(step, width=width, has_colour=console.color_system is not None and not console.no_color):
        console.print(line, soft_wrap=True)


def _config_rows(run: Run) -> list[tuple[str, str]]:
    config = run.config
    train, network = config.train, config.strategy.network
    until = f"{train.epochs} epochs" if train.epochs is not None else f"{train.steps} steps"
    updates = train.optimizer or train.solver
    by = "" if updates is None else f"{updates.type} lr {updates.lr:g}, "
    layout = f"{network.data} x {network.tensor} x {network.pipeline}"
    return [
        ("task", " ".join([config.task.type, *(f"{key}={value}" for key, value in config.task.arguments.items())])),
        ("train", f"{until}, batches of {train.batch_size}, {by}{train.precision}"),
        ("strategy", f"{config.strategy.exchange.type}, data x tensor x pipeline = {layout}"),
        ("engine", config.engine),
    ]


def _checkpoint_rows(run: Run) -> list[tuple[str, str]]:
    from orchestray.platform.terminal.format import size

    return [
        (found.name, size(found.num_bytes) + ("  (best)" if is_best else "")) for found, is_best in _checkpoints(run)
    ]


def _checkpoints(run: Run) -> list[tuple[Found, bool]]:
    """Return each checkpoint, and True for the run's best one."""
    every = run.checkpoints()
    return [(found, found.step == every[-1].best_step) for found in every]


def _event_row(event: dict[str, Any]) -> tuple[str, str]:
    from orchestray.platform.terminal.format import duration

    shown = {"event", "time_s", "role", "rank", "traceback"}
    who = f"{event['role']}/{event['rank']}" if event.get("role") is not None else ""
    more = [f"{key}={value}" for key, value in event.items() if key not in shown and value is not None]
    return duration(event.get("time_s")), "  ".join(filter(None, [str(event.get("event")), who, *more]))


def _loss_curve(run: Run) -> list[str]:
    from orchestray.platform.terminal.plot import plot

    table = run.metrics()
    if not {"step", "loss"} <= set(table.column_names):
        return []
    splits = table["split"].to_pylist() if "split" in table.column_names else [None] * len(table)
    rows = zip(table["step"].to_pylist(), table["loss"].to_pylist(), splits, strict=True)
    points = [(step, loss) for step, loss, split in rows if split is None]
    return plot([step for step, _ in points], [loss for _, loss in points])


def _pairs(rows: Any) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, justify="left")
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(f"  {name}", Text(text))
    return grid


def _section(heading: str, body: RenderableType) -> None:
    from rich.text import Text

    show(Text(f"\n{heading}", style="bold"))
    show(body)


def _moment(at_s: float | None) -> str:
    """Return a time in local time, as short as is clear: the hour if today, the day if this year."""
    if at_s is None:
        return "-"
    moment, now = (datetime.fromtimestamp(time_s, UTC).astimezone() for time_s in (at_s, time.time()))
    if moment.date() == now.date():
        return f"{moment:%H:%M}"
    return f"{moment:%b %d}" if moment.year == now.year else f"{moment:%Y-%m-%d}"
