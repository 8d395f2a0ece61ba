"""The results of a measurement as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestray.loadtest.loads import ClosedLoop, OpenLoop
from orchestray.loadtest.measure import Measured, Progress

if TYPE_CHECKING:
    from rich.table import Table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def one_table(measured: Measured) -> Table:
    """Return a table of one load in two columns."""
    from rich.table import Table

    summary = measured.summary()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "load", f"{summary['load']} for {summary['duration_s']:g} s, after {summary['warm_up_s']:g} s of warm-up"
    )
    table.add_row("offered", f"{summary['num_offered']:,} requests, {summary['offered_per_s']:,.5g}/s")
    table.add_row("answered", f"{summary['num_ok']:,} with 2xx, {summary['answered_per_s']:,.5g}/s")
    table.add_row("under way", f"{summary['mean_in_flight']:,.3g} requests on average")
    if summary["goodput_per_s"] is not None:
        table.add_row("goodput", f"{summary['goodput_per_s']:,.5g}/s within {summary['deadline_ms']:g} ms")
    latency = summary["latency_ms"]
    named = [f"{name.replace('_', '.')} {_ms(value)}" for name, value in latency.items()]
    table.add_row("latency, ms", "  ".join(named))
    if summary["num_failed"]:
        table.add_row("failed", failures(summary))
    closed = isinstance(measured.plan.load, ClosedLoop)
    table.add_row("this program", client(summary["client"], closed=closed))
    return table


def failures(summary: dict[str, Any]) -> str:
    """Return the numbers of requests without a 2xx answer, by reason."""
    by_why = [f"{count:,} {status}" for status, count in summary["statuses"].items() if not status.startswith("2")]
    by_why += [f"{count:,} {why}" for why, count in summary["errors"].items()]
    return ", ".join(by_why) or "none"


def client(summary: dict[str, Any], *, closed: bool) -> str:
    """Return the CPU use and the lateness of the load generator itself."""
    cores = " + ".join(f"{percent:.0f} %" for percent in summary["cpu_percent"])
    lag = summary["lag_ms"]["p99"]
    return f"{cores} of a core" + ("" if lag is None or closed else f"; requests sent at most {_ms(lag)} ms late (p99)")


def warning(measured: Measured) -> str | None:
    """Return a warning if the load generator itself was the limit, else None."""
    if not measured.limited:
        return None
    return (
        f"Careful: at {measured.plan.load} the load generator itself was too slow, and its delay is in these numbers: "
        "give it cores of its own (another machine), or more processes (--processes)."
    )


def sweep_table(points: Sequence[Measured]) -> Table:
    """Return a table with one row per load."""
    from rich.table import Table

    deadline_s = points[0].plan.deadline_s
    table = Table(title="Latency against rate, ms", title_justify="left", box=None, padding=(0, 2, 0, 0))
    names = ["load", "answered", "mean", "p50", "p90", "p99", "p99.9", "max", "failed", "own CPU"]
    if deadline_s is not None:
        names.insert(2, f"in {deadline_s * 1e3:g} ms")
    for name in names:
        table.add_column(name, justify="left" if name == "load" else "right", no_wrap=name not in {"load", "own CPU"})
    for point in points:
        table.add_row(*row(point))
    return table


def row(point: Measured) -> list[str]:
    """Return the cells of one load of a sweep."""
    summary = point.summary()
    latency = summary["latency_ms"]
    cells = [_short(point), f"{summary['answered_per_s']:,.4g}/s"]
    if summary["goodput_per_s"] is not None:
        cells.append(f"{summary['goodput_per_s']:,.4g}/s")
    cells += [_ms(latency[name]) for name in ("mean", "p50", "p90", "p99", "p99_9", "max")]
    return [*cells, f"{summary['num_failed']:,}", f"{max(summary['client']['cpu_percent']):.0f} %"]


def _short(point: Measured) -> str:
    load = point.plan.load
    if isinstance(load, OpenLoop):
        return f"{load.rate_per_s:g}/s"
    return f"{load.num_clients} clients" if isinstance(load, ClosedLoop) else str(load)


def line(point: Measured) -> str:
    """Return one load of a sweep as a line."""
    summary = point.summary()
    latency = summary["latency_ms"]
    failed = f", {summary['num_failed']:,} failed" if summary["num_failed"] else ""
    answered = f"{summary['load']}: {summary['answered_per_s']:,.4g}/s answered"
    return f"{answered}, mean {_ms(latency['mean'])} ms, p99 {_ms(latency['p99'])} ms{failed}"


def progress_line(load: str, end_s: float, progress: Progress) -> str:
    """Return the progress of a load as a line."""
    failed = f", {progress.num_failed:,} failed" if progress.num_failed else ""
    return (
        f"{load}: {min(progress.now_s, end_s):.0f}/{end_s:.0f} s, {progress.num_answered:,} answered, "
        f"{progress.num_pending:,} pending{failed}"
    )
