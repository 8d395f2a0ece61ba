"""A measurement on the terminal: progress on stderr, tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestray.loadtest.loads import ClosedLoop, OpenLoop
from orchestray.loadtest.picture import svg
from orchestray.loadtest.plan import Plan
from orchestray.loadtest.results import EndpointError, Measured, Progress
from orchestray.loadtest.sweep import sustained, sweep
from orchestray.platform.terminal.tables import show

_DRAWN = ("p50", "p99")


class Session:
    """A session that measures a plan, or a sweep of it, with `measure`, and shows the results."""

    def __init__(self, plan: Plan, measure: Callable[..., Measured], *, quiet: bool) -> None:
        self._plan = plan
        self._measure_plan = measure
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._measured: list[Measured] = []
        self._swept: list[Measured] = []
        self.is_interrupted = False
        """True if Ctrl-C ended it early."""

    def single(self) -> dict[str, Any]:
        """Measure the plan's load; return the result for JSON."""
        measured = self._measure(self._plan)
        show(_table(measured))
        _warn([measured])
        return {"kind": "single", **measured.summary()}

    def sweep(self, rates_per_s: Sequence[float]) -> dict[str, Any]:
        """Measure rates in turn; return the result for JSON."""
        try:
            for point in sweep(self._plan, self._measure, rates_per_s):
                self._note(point)
        except KeyboardInterrupt:
            if not self._measured:
                raise
            self.is_interrupted = True
        self._swept = points = [each for each in self._measured if isinstance(each.plan.load, OpenLoop)]
        saturated = self._measured[0] if len(points) < len(self._measured) else None
        best = sustained(points)
        show(_sweep_table(self._measured))
        if best is not None:
            within = "" if best.plan.deadline_s is None else f" within {best.plan.deadline_s * 1e3:g} ms"
            show(f"\nIt kept up with {best.plan.load}{within}.")
        _warn(points)
        return {
            "kind": "sweep",
            "saturated": saturated.summary() if saturated else None,
            "points": [point.summary() for point in points],
            "sustained_per_s": None if best is None else best.summary()["offered_per_s"],
        }

    def picture(self) -> str:
        """Return a chart of the results as SVG."""
        target = self._plan.target
        title = f"Latency of {target.method} {target.path}"
        return svg(self._lines(), title=title, x_label="requests/s" if self._swept else "s", y_label="latency, ms")

    def _lines(self) -> dict[str, list[tuple[float, float]]]:
        """Return percentiles of latency, ms, over the offered rate of a sweep, or over the seconds of one load."""
        if self._swept:
            rows = [(point.offered_per_s, point.summary()["latency_ms"]) for point in self._swept]
        else:
            seconds = self._measured[-1].summary()["seconds"]
            rows = [(one["second"] + 0.5, {name: one[f"{name}_ms"] for name in _DRAWN}) for one in seconds]
        return {name: [(x, latency[name]) for x, latency in rows if latency[name]] for name in _DRAWN}

    def check_answered(self) -> None:
        """Check that there was at least one answer.

        Raises:
            EndpointError: no request was answered with 2xx.
        """
        if not any(measured.tally.latency.num for measured in self._measured):
            why = _failures(self._measured[-1].summary())
            raise EndpointError(f"{self._plan.target.url} answered no request with 2xx: {why}.")

    def _measure(self, plan: Plan) -> Measured:
        with self._console.status(str(plan.load), refresh_per_second=2) as status:

            def update(now: Progress) -> None:
                failed = f", {now.num_failed:,} failed" if now.num_failed else ""
                counts = f"{now.num_answered:,} answered, {now.num_pending:,} pending{failed}"
                status.update(f"{plan.load}: {min(now.now_s, plan.end_s):.0f}/{plan.end_s:.0f} s, {counts}")

            measured = self._measure_plan(plan, on_progress=update)
        self._measured.append(measured)
        self.is_interrupted |= measured.is_interrupted
        return measured

    def _note(self, measured: Measured) -> None:
        """Print a line about a finished point of a sweep."""
        summary = measured.summary()
        failed = f", {summary['num_failed']:,} failed" if summary["num_failed"] else ""
        mean, p99 = (_ms(summary["latency_ms"][name]) for name in ("mean", "p99"))
        answered = f"{summary['load']}: {summary['answered_per_s']:,.4g}/s answered"
        self._console.print(f"{answered}, mean {mean} ms, p99 {p99} ms{failed}")


def _warn(measured: Sequence[Measured]) -> None:
    """Warn if the load generator itself was the limit."""
    limited = [each for each in measured if each.limited]
    if limited:
        sys.stderr.write(
            f"Careful: at {limited[-1].plan.load} the load generator itself was too slow, and its delay is in these "
            "numbers: give it cores of its own (another machine), or more processes (--processes).\n"
        )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _failures(summary: dict[str, Any]) -> str:
    """Return the numbers of requests without a 2xx answer, by reason."""
    counts = {status: count for status, count in summary["statuses"].items() if not status.startswith("2")}
    return ", ".join(f"{count:,} {why}" for why, count in (counts | summary["errors"]).items()) or "none"


def _table(measured: Measured) -> Table:
    """Return a table of one load in two columns."""
    summary = measured.summary()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    within = f"for {summary['duration_s']:.4g} s, after {summary['warm_up_s']:g} s of warm-up"
    table.add_row("load", f"{summary['load']} {within}")
    table.add_row("offered", f"{summary['num_offered']:,} requests, {summary['offered_per_s']:,.5g}/s")
    table.add_row("answered", f"{summary['num_ok']:,} with 2xx, {summary['answered_per_s']:,.5g}/s")
    table.add_row("under way", f"{summary['mean_in_flight']:,.3g} requests on average")
    if summary["goodput_per_s"] is not None:
        table.add_row("goodput", f"{summary['goodput_per_s']:,.5g}/s within {summary['deadline_ms']:g} ms")
    named = [f"{name.replace('_', '.')} {_ms(value)}" for name, value in summary["latency_ms"].items()]
    table.add_row("latency, ms", "  ".join(named))
    if summary["num_failed"]:
        table.add_row("failed", _failures(summary))
    cores, lag_ms = summary["client"]["cpu_percent"], summary["client"]["lag_ms"]["p99"]
    own = f"{' + '.join(f'{percent:.0f} %' for percent in cores)} of a core"
    if lag_ms is not None and not isinstance(measured.plan.load, ClosedLoop):
        own += f"; requests sent at most {_ms(lag_ms)} ms late (p99)"
    table.add_row("this program", own)
    return table


def _sweep_table(points: Sequence[Measured]) -> Table:
    """Return a table with one row per load."""
    deadline_s = points[0].plan.deadline_s
    table = Table(title="Latency against rate, ms", title_justify="left", box=None, padding=(0, 2, 0, 0))
    names = ["load", "answered", "mean", "p50", "p90", "p99", "p99.9", "max", "failed", "own CPU"]
    if deadline_s is not None:
        names.insert(2, f"in {deadline_s * 1e3:g} ms")
    for name in names:
        table.add_column(name, justify="left" if name == "load" else "right", no_wrap=name not in {"load", "own CPU"})
    for point in points:
        summary, load = point.summary(), point.plan.load
        short = f"{load.rate_per_s:g}/s" if isinstance(load, OpenLoop) else str(load).replace(" closed-loop", "")
        cells = [short, f"{summary['answered_per_s']:,.4g}/s"]
        cells += [] if deadline_s is None else [f"{summary['goodput_per_s']:,.4g}/s"]
        cells += [_ms(summary["latency_ms"][name]) for name in ("mean", "p50", "p90", "p99", "p99_9", "max")]
        table.add_row(*cells, f"{summary['num_failed']:,}", f"{max(summary['client']['cpu_percent']):.0f} %")
    return table
