"""`docs/plot_exchange.py` draws what runs have to say beside the loss, and nothing else."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
STEPS = [{"step": step, "loss": 1.0 / step} for step in range(1, 5)]
BYTES = {"bytes": {"sent": 1_000_000, "dense": 4_000_000}}
WORKER = {"shares": 4, "busy_s": 3.0, "waited_s": 1.0}


def run_at(directory: Path, result: dict[str, Any] | None = None, lines: list[dict[str, Any]] | None = None) -> Path:
    directory.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines or STEPS)
    (directory / "metrics.jsonl").write_text(text)
    if result is not None:
        (directory / "result.json").write_text(json.dumps(result))
    return directory


@pytest.fixture(autouse=True)
def _beside_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")


def plot(*paths: Path) -> None:
    importlib.import_module("plot_exchange").main([str(path) for path in paths])


def drawn(*paths: Path) -> ET.Element:
    picture = paths[0].parent / "picture.svg"
    plot(*paths, picture)
    return ET.parse(picture).getroot()  # noqa: S314 - written the line before


def titles(picture: ET.Element) -> list[str]:
    """Return the first words of each panel."""
    return [panel[0].text.split(",")[0] for panel in picture.iter(f"{SVG}g")]  # type: ignore[union-attr]


def bars(picture: ET.Element, title: str, number: int = 0) -> list[ET.Element]:
    """Return the bars of the run of this number in a panel."""
    panel = next(panel for panel in picture.iter(f"{SVG}g") if panel[0].text.startswith(title))  # type: ignore[union-attr]
    return [bar for bar in panel.iter(f"{SVG}rect") if bar.get("class") == f"run{number}"]


STALE = {"staleness": {"max": 3, "mean": 1.0, "histogram": {"0": 6, "1": 3, "3": 1}}}
SAID = {
    "Staleness of updates": (STALE, STEPS),
    "Disagreement between replicas": ({}, [*STEPS[:3], {**STEPS[3], "disagreement": 0.5}]),
    "What the compression keeps": ({}, [{**line, "compression_error": 0.1} for line in STEPS]),
    "Bytes sent": (BYTES, STEPS),
    "Dropped": ({"lost_updates": 2, "updates": 8}, STEPS),
    "Waiting": ({"workers": [WORKER]}, STEPS),
}


@pytest.mark.parametrize("panel", SAID)
def test_a_run_has_the_panel_of_what_it_says_and_no_other(panel: str, tmp_path: Path) -> None:
    result, lines = SAID[panel]
    assert titles(drawn(run_at(tmp_path / "run", result, lines))) == [panel]


def test_bars_are_as_long_as_their_parts(tmp_path: Path) -> None:
    picture = drawn(run_at(tmp_path / "run", {**STALE, **BYTES, "workers": [WORKER], "dropped_copies": 1}))
    heights = [float(bar.get("height", "")) for bar in bars(picture, "Staleness")]
    assert [height / heights[0] for height in heights] == pytest.approx([1, 1 / 2, 1 / 6], abs=0.01)
    for title in ("Bytes", "Dropped", "Waiting"):
        panel = next(panel for panel in picture.iter(f"{SVG}g") if panel[0].text.startswith(title))  # type: ignore[union-attr]
        whole, part = (float(bar.get("width", "")) for bar in panel.iter(f"{SVG}rect"))
        assert part / whole == pytest.approx(1 / 4, abs=0.01)


def test_runs_are_told_apart_and_bytes_are_to_one_scale(tmp_path: Path) -> None:
    large = {"bytes": {"sent": 8_000_000, "dense": 8_000_000}}
    picture = drawn(run_at(tmp_path / "small", BYTES), run_at(tmp_path / "large", large))
    (small,), (whole,) = bars(picture, "Bytes", 0), bars(picture, "Bytes", 1)
    assert float(small.get("width", "")) / float(whole.get("width", "")) == pytest.approx(1 / 8, abs=0.01)
    names = [text.text for text in picture.findall(f"{SVG}text")]
    assert names == ["small", "large"]


def test_what_cannot_be_drawn_is_told_in_a_sentence(tmp_path: Path) -> None:
    silent = run_at(tmp_path / "silent", {"bytes": {"sent": 0, "dense": 0}, "staleness": None, "workers": []})
    under_way = run_at(tmp_path / "under_way")
    picture = tmp_path / "picture.svg"
    for paths, sentence in (
        ([silent, under_way], "these runs say nothing beside their loss"),
        ([tmp_path], "is no run directory"),
        ([silent] * 7, "draw at most 6"),
        ([], "usage: "),
    ):
        with pytest.raises(SystemExit, match=sentence):
            plot(*paths, picture)
    assert not picture.exists()
