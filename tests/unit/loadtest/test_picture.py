"""The pictures of what was measured."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from orchestray.loadtest.picture import svg

SVG = "{http://www.w3.org/2000/svg}"
LINES = {"p50": [(10.0, 1.0), (100.0, 2.0), (1000.0, 40.0)], "p99": [(10.0, 3.0), (1000.0, 400.0)]}


def drawn(lines: dict[str, list[tuple[float, float]]]) -> ET.Element:
    return ET.fromstring(svg(lines, title="a < b", x_label="requests/s", y_label="ms"))  # noqa: S314 - our own


def test_every_point_of_every_line_is_drawn_inside_the_picture() -> None:
    root = drawn(LINES)
    circles = root.findall(f"{SVG}circle")
    assert len(circles) == 5
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    assert all(0 < float(c.attrib["cx"]) < width and 0 < float(c.attrib["cy"]) < height for c in circles)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a < b", "p50", "p99", "requests/s", "ms", "1,000"} <= set(texts)
    first, last = (float(root.findall(f"{SVG}circle")[index].attrib["cy"]) for index in (0, 2))
    assert first > last  # 1 ms is below 40 ms


def ticks(root: ET.Element, axis: str) -> dict[float, float]:
    """Return the values of an axis' ticks, and where they are."""
    anchor, at = {"x": ("middle", "x"), "y": ("end", "y")}[axis]
    texts = [element for element in root.iter(f"{SVG}text") if element.attrib.get("text-anchor") == anchor]
    named = {element.text or "": element.attrib.get(at, "") for element in texts}
    return {float(text.replace(",", "")): float(place) for text, place in named.items() if text[:1].isdigit()}


@pytest.mark.parametrize("end", [1000.0, 0.3, 7.0, 24.0])
def test_ticks_are_round_and_within(end: float) -> None:
    found = sorted(ticks(drawn({"a": [(0.0, 1.0), (end, 1.0)]}), "x"))
    assert 3 <= len(found) <= 9
    assert found[0] == 0
    assert found[-1] <= end * 1.06
    assert all(value / found[1] == pytest.approx(round(value / found[1])) for value in found)
    assert float(f"{found[1]:.2g}") == found[1]


@pytest.mark.parametrize(("low", "high"), [(0.31, 0.32), (0.001, 5000.0), (99.0, 100.0), (1.0, 1.0), (0.2, 90.0)])
def test_a_logarithmic_axis_is_between_round_numbers_and_holds_its_values(low: float, high: float) -> None:
    root = drawn({"a": [(1.0, low), (2.0, high)]})
    found = ticks(root, "y")
    assert 2 <= len(found) <= 9
    assert min(found) <= low <= high < max(found)
    assert all(f"{value:.0e}"[0] in "125" and float(f"{value:.0e}") == value for value in found)
    heights = [float(circle.attrib["cy"]) for circle in root.findall(f"{SVG}circle")]
    assert all(found[max(found)] - 4 <= height <= found[min(found)] - 4 for height in heights)


def test_a_picture_of_nothing_is_a_picture() -> None:
    assert drawn({"p50": []}).findall(f"{SVG}circle") == []
