"""A measurement on the terminal: a progress line, then tables and a chart on stdout, and files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from orchestray.loadtest import show as tables
from orchestray.loadtest.errors import EndpointError
from orchestray.loadtest.measure import Measured, Progress, default_num_processes, measure
from orchestray.loadtest.picture import latency_against_rate, latency_against_time, svg, text_chart
from orchestray.loadtest.plan import Plan
from orchestray.loadtest.sweep import run_sweep
from orchestray.platform.terminal.tables import show

_CLEAR_LINE = "\r\x1b[K"


class Session:
    """A session that measures a plan, or a sweep of it, and shows the results."""

    def __init__(self, plan: Plan, num_processes: int | None, *, quiet: bool) -> None:
        self._plan = plan
        self._num_processes = num_processes or default_num_processes()
        self._quiet = quiet
        self._measured: list[Measured] = []
        self._swept: tuple[Measured, ...] = ()

    def single(self) -> dict[str, Any]:
        """Measure the plan's load; return the result for JSON."""
        measured = self._measure(self._plan)
        show(tables.one_table(measured))
        self._warn([measured])
        return {"kind": "single", **measured.summary()}

    def sweep(self, rates_per_s: Sequence[float]) -> dict[str, Any]:
        """Measure rates in turn; return the result for JSON."""
        sweep = run_sweep(self._plan, self._measure, rates_per_s=rates_per_s, on_point=self._note)
        self._swept = sweep.points
        show(tables.sweep_table([*([sweep.saturated] if sweep.saturated else []), *sweep.points]))
        if sweep.points and any(point.tally.latency.num for point in sweep.points):
            _print(f"\n{text_chart(latency_against_rate(sweep.points), x_label='requests/s', y_label='ms')}")
        best = sweep.sustained
        if best is not None:
            within = "" if best.plan.deadline_s is None else f" within {best.plan.deadline_s * 1e3:g} ms"
            _print(f"\nIt kept up with {best.plan.load}{within}.")
        self._warn(sweep.points)
        return {"kind": "sweep", **sweep.summary()}

    def picture(self) -> str:
        """Return a chart of the results as SVG."""
        target = self._plan.target
        if self._swept:
            series, x_label = latency_against_rate(self._swept), "requests/s"
        else:
            series, x_label = latency_against_time(self._measured[-1]), "s"
        title = f"Latency of {target.method} {target.path}"
        return svg(series, title=title, x_label=x_label, y_label="latency, ms")

    def check_answered(self) -> None:
        """Check that there was at least one answer.

        Raises:
            EndpointError: no request was answered with 2xx.
        """
        if not any(measured.tally.latency.num for measured in self._measured):
            why = tables.failures(self._measured[-1].summary())
            raise EndpointError(f"{self._plan.target.url} answered no request with 2xx: {why}.")

    def _measure(self, plan: Plan) -> Measured:
        measured = measure(
            plan, num_processes=self._num_processes, on_progress=lambda now: self._show_progress(plan, now)
        )
        if self._live:
            _write(_CLEAR_LINE)
        self._measured.append(measured)
        return measured

    @property
    def _live(self) -> bool:
        return not self._quiet and sys.stderr.isatty()

    def _show_progress(self, plan: Plan, progress: Progress) -> None:
        if self._live:
            line = tables.progress_line(str(plan.load), plan.end_s, progress)
            _write(f"{_CLEAR_LINE}{line}")

    def _note(self, measured: Measured) -> None:
        """Print a line about a finished point of a sweep."""
        if not self._quiet:
            _write(f"{tables.line(measured)}\n")

    def _warn(self, measured: Sequence[Measured]) -> None:
        texts = [text for each in measured if (text := tables.warning(each)) is not None]
        if texts:
            _write(f"{texts[-1]}\n")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
