"""The pictures of what was measured."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from orchestray.loadtest.axes import Axis, Series, axes, label
from orchestray.loadtest.loads import ClosedLoop, OpenLoop
from orchestray.loadtest.measure import Measured
from orchestray.loadtest.picture import latency_against_rate, latency_against_time, svg, text_chart
from orchestray.loadtest.plan import Plan, Target
from orchestray.loadtest.sweep import SHARES, run_sweep
from orchestray.loadtest.tally import Tally

SVG = "{http://www.w3.org/2000/svg}"
LINES = [Series("p50", ((10.0, 1.0), (100.0, 2.0), (1000.0, 40.0))), Series("p99", ((10.0, 3.0), (1000.0, 400.0)))]


def measured(plan: Plan, capacity_per_s: float) -> Measured:
    """Return the measurement of a server that answers up to a rate: latencies grow with the load."""
    tally = Tally(0.0, 1.0)
    rate = plan.load.rate_per_s if isinstance(plan.load, OpenLoop) else capacity_per_s
    for number in range(int(rate)):
        due_s = number / rate
        tally.offer(due_s, due_s)
        tally.answer(due_s, max(due_s + 0.01, (number + 1) / capacity_per_s), 200)
    return Measured(plan, tally, (0.1,))


PLAN = Plan(Target("h", 1, "/"), OpenLoop(1.0), duration_s=1.0, warm_up_s=0.0)


def test_every_point_of_every_line_is_drawn_inside_the_picture() -> None:
    root = ET.fromstring(svg(LINES, title="a < b", x_label="requests/s", y_label="ms"))  # noqa: S314 - our own
    circles = root.findall(f"{SVG}circle")
    assert len(circles) == 5
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    assert all(0 < float(c.attrib["cx"]) < width and 0 < float(c.attrib["cy"]) < height for c in circles)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a < b", "p50", "p99", "requests/s", "ms"} <= set(texts)
    first, last = (float(root.findall(f"{SVG}circle")[index].attrib["cy"]) for index in (0, 2))
    assert first > last  # 1 ms is below 40 ms


def test_a_text_chart_has_every_point_and_its_numbers() -> None:
    text = text_chart(LINES, x_label="requests/s", y_label="ms")
    body = text.split("\n", 1)[1]
    assert (body.count("o"), body.count("*")) == (3, 2)
    assert "1,000" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("low", "high"), [(0.0, 1050.0), (0.0, 0.3), (0.0, 7.0)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    ticks = Axis(low, high).ticks()
    assert 3 <= len(ticks) <= 9
    assert ticks[0] == 0
    assert ticks[-1] <= high * 1.001
    assert all(len(label(tick)) <= 6 for tick in ticks)


@pytest.mark.parametrize(("low", "high"), [(0.31, 0.32), (0.001, 5000.0), (99.0, 100.0), (1.0, 1.0)])
def test_a_logarithmic_axis_holds_its_values_and_two_ticks_at_least(low: float, high: float) -> None:
    _, up = axes([Series("a", ((1.0, low), (2.0, high)))])
    assert 0.0 <= up.share(low) <= up.share(high) <= 1.0
    assert len(up.ticks()) >= 2


def test_a_picture_of_nothing_is_a_picture() -> None:
    ET.fromstring(svg([Series("p50", ())], title="", x_label="", y_label=""))  # noqa: S314 - our own
    assert text_chart([Series("p50", ())], x_label="", y_label="")


def test_a_sweep_begins_with_what_clients_reach_and_ends_when_the_server_does_not_keep_up() -> None:
    sweep = run_sweep(PLAN, lambda plan: measured(plan, 1000.0))
    assert sweep.saturated is not None
    offered = [pytest.approx(share * 1000, rel=0.05) for share in SHARES]
    assert [point.offered_per_s for point in sweep.points] == offered
    assert sweep.sustained is not None
    assert sweep.sustained is sweep.points[-2]
    worse = run_sweep(PLAN, lambda plan: measured(plan, 1000.0 if isinstance(plan.load, ClosedLoop) else 400.0))
    assert [point.offered_per_s for point in worse.points] == offered[:3]


def test_rates_that_are_named_are_all_measured_in_order() -> None:
    over = run_sweep(PLAN, lambda plan: measured(plan, 100.0), rates_per_s=[400, 50, 300, 90])
    assert [point.offered_per_s for point in over.points] == [50, 90, 300, 400]
    assert over.summary()["sustained_per_s"] == 90


def test_the_picture_of_a_sweep_is_that_of_its_numbers() -> None:
    points = run_sweep(PLAN, lambda plan: measured(plan, 1000.0), rates_per_s=[100, 500]).points
    p50, p99 = latency_against_rate(points)
    assert (p50.name, p99.name) == ("p50", "p99")
    assert [x for x, _ in p50.points] == [100, 500]
    assert [y for _, y in p50.points] == [pytest.approx(10.0, rel=0.01)] * 2
    ((at, median_ms),) = latency_against_time(points[0])[0].points
    assert (at, median_ms) == (0.5, pytest.approx(10.0, rel=0.01))
