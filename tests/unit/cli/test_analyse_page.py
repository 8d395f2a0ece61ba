"""The page of an analysis needs no network, and its bars are the intervals of the layers."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from orchestray.cli.analyse_page import page_of
from orchestray.trainers.planning.analyse import Analysis, analyse
from orchestray.trainers.planning.measured import Ceilings, Measured
from orchestray.trainers.planning.subject import Subject


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).to("meta").train()
    return analyse(Subject("<own> & $model", model, torch.zeros(4, 3, 8, 8, device="meta"), 4))


class Parsed(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def test_it_loads_nothing_and_runs_nothing_and_a_name_is_text(analysis: Analysis) -> None:
    page = page_of(analysis)
    parsed = Parsed(page)
    assert {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "own"} == set()
    assert not any(name in ("src", "href") or name.startswith("on") for _, attrs in parsed.tags for name in attrs)
    assert "url(" not in page
    assert "<own> & $model" in parsed.texts


def test_each_interval_is_a_bar_of_its_part_of_the_depth_with_the_longest_chain_above_it(analysis: Analysis) -> None:
    bars = [attrs for tag, attrs in Parsed(page_of(analysis)).tags if tag == "i" and "style" in attrs]
    end = max(interval.end for interval in analysis.intervals)
    wanted = sorted(
        (100 * begin / end, 100 * (stop - begin) / end)
        for interval in analysis.intervals
        for begin, stop in ((interval.begin, interval.end), *interval.on_path)
    )
    found = sorted(tuple(map(float, re.findall(r"[\d.]+(?=%)", str(attrs["style"])))) for attrs in bars)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_a_measured_layer_is_a_dot_within_the_plot_that_is_higher_the_faster_it_is(analysis: Analysis) -> None:
    names = [layer.name for layer in analysis.layers if layer.name and layer.forward.work]

    def heights(slower: str) -> list[float]:
        times = {name: 2e-3 if name == slower else 1e-3 for name in names}
        page = page_of(analysis, Measured(Ceilings(1e12, 1e12), 2e-3, times, {}, {}, {}))
        dots = [attrs for tag, attrs in Parsed(page).tags if tag == "i" and "bottom" in str(attrs.get("style"))]
        places = [tuple(map(float, re.findall(r"[\d.]+(?=%)", str(each["style"])))) for each in dots]
        assert len(places) == len(names)
        assert all(0 < x < 100 and 0 < y < 100 for x, y in places)
        return [y for _, y in places]

    assert heights(names[0])[0] < heights(names[-1])[0]


def test_the_tables_have_each_layer_each_split_and_what_was_measured(analysis: Analysis) -> None:
    times = {layer.name: 1e-3 for layer in analysis.layers if layer.name}
    convolutions = {"0": {"torch": 1e-3, "im2col": float("inf")}}
    measured = Measured(Ceilings(1e9, 1e9), 2e-3, times, {}, {}, convolutions)
    texts = Parsed(page_of(analysis, measured)).texts
    for text in ("Conv2d", "Linear", "data", "auto", "none", "Each convolution by each algorithm, ms", "im2col"):
        assert text in texts
    assert "Measured" not in Parsed(page_of(analysis)).texts
