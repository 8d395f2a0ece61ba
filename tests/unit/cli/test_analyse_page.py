"""The page of an analysis needs no network, and its bars are the spans of the layers."""

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


def test_each_span_is_a_bar_of_its_part_of_the_depth_with_the_longest_chain_above_it(analysis: Analysis) -> None:
    bars = [attrs for tag, attrs in Parsed(page_of(analysis)).tags if tag == "i" and "style" in attrs]
    end = max(span.end for span in analysis.spans)
    wanted = sorted(
        (100 * begin / end, 100 * (stop - begin) / end)
        for span in analysis.spans
        for begin, stop in ((span.begin, span.end), *span.on_path)
    )
    found = sorted(tuple(map(float, re.findall(r"[\d.]+(?=%)", str(attrs["style"])))) for attrs in bars)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_the_tables_have_each_layer_each_split_and_what_was_measured(analysis: Analysis) -> None:
    times = {layer.name: 1e-3 for layer in analysis.layers if layer.name}
    measured = Measured(Ceilings(1e9, 1e9), 2e-3, times, {"0": {"torch": 1e-3, "im2col": float("inf")}})
    texts = Parsed(page_of(analysis, measured)).texts
    for text in ("Conv2d", "Linear", "data", "auto", "none", "Each convolution by each algorithm, ms", "im2col"):
        assert text in texts
    assert "Measured" not in Parsed(page_of(analysis)).texts
