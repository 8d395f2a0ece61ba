"""The picture of the spectrum of consistency shows the results that are there."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

import plot_consistency
from support.pages import DOCS, ROOT

RESULT = json.loads((ROOT / "benchmarks" / "results" / "exchanges.json").read_text(encoding="utf-8"))


def test_the_picture_is_that_of_the_results() -> None:
    assert (DOCS / "pictures" / "consistency.svg").read_text(encoding="utf-8") == plot_consistency.draw(RESULT)


def test_a_dot_stands_between_the_ends_of_its_line_and_each_scheme_has_one() -> None:
    picture = ET.fromstring(plot_consistency.draw(RESULT))  # noqa: S314 - drawn a line before
    svg = "{http://www.w3.org/2000/svg}"
    dots = [float(dot.attrib["cx"]) for dot in picture.iter(f"{svg}circle")]
    lines = [path.attrib["d"] for path in picture.iter(f"{svg}path") if path.attrib["class"] == "train"]
    assert len(dots) == len(lines) == sum(len(schemes) for _, schemes in plot_consistency.SPECTRUM)
    for dot, line in zip(dots, lines, strict=True):
        left, right = line.removeprefix("M").split(" ")[0], line.rpartition("H")[2]
        assert float(left) <= dot <= float(right)
        assert plot_consistency.LEFT <= float(left) <= float(right) <= plot_consistency.RIGHT


def test_a_scheme_without_a_measurement_is_an_error_and_not_left_out() -> None:
    with pytest.raises(KeyError):
        plot_consistency.draw({**RESULT, "measurements": RESULT["measurements"][:3]})
