"""`docs/plot_gallery.py` draws what runs and searches leave behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "plot_gallery", raising=False)
    import plot_gallery

    return lambda kind, *runs: ET.fromstring(plot_gallery.PICTURES[kind](runs))  # noqa: S314 - drawn a line before


def directory(folder: Path, **files: Sequence[Mapping[str, Any]]) -> Path:
    folder.mkdir()
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def texts(picture: ET.Element) -> list[str]:
    return [one.text or "" for one in picture.iter(f"{SVG}text")]


def test_a_loss_is_drawn_with_what_was_lost_and_what_took_its_place(draw: Any, tmp_path: Path) -> None:
    events = [
        {"event": "fault", "at_step": 3},
        {"event": "worker_lost", "role": "parameter_server", "rank": 0},
        {"event": "server_taken_over", "role": "parameter_server", "rank": 1},
    ]
    metrics = [{"step": step, "loss": 1.0 / step} for step in range(1, 6)]
    one = directory(tmp_path / "one", metrics=metrics, events=events)
    other = directory(tmp_path / "other", metrics=metrics, events=[])
    drawn = texts(draw("losses", one, other))
    assert {"parameter server 0 is lost", "its copy takes over", "one", "other"} <= set(drawn)


def test_the_actions_of_a_step_are_as_wide_as_they_took_long(draw: Any, tmp_path: Path) -> None:
    actions = [
        {"rank": 0, "kind": "F", "begin_s": 10.0, "end_s": 10.1},
        {"rank": 1, "kind": "B", "begin_s": 10.1, "end_s": 10.4},
    ]
    run = directory(tmp_path / "run")
    (run / "timeline.json").write_text(json.dumps({"steps": [{"step": 1, "actions": actions}]}), encoding="utf-8")
    picture = draw("timeline", run)
    boxes = [one for one in picture.iter(f"{SVG}rect") if one.get("height") == "22"]
    short, long = (float(one.get("width", 0)) for one in boxes)
    assert long == pytest.approx(3 * short, rel=0.01)
    assert {"run: a step of 400.0 ms", "worker 0", "worker 1", "forward", "backward"} <= set(texts(picture))


def test_the_line_from_the_first_ancestor_to_the_best_trial_stands_out(draw: Any, tmp_path: Path) -> None:
    parents = {0: None, 1: None, 2: 0, 3: 2, 4: 1}
    lineage = [{"trial": trial, "parent": parent} for trial, parent in parents.items()]
    trials = [{"trial": trial, "objective": 0.1 * trial if trial < 4 else None} for trial in parents]
    picture = draw("lineage", directory(tmp_path / "search", lineage=lineage, trials=trials))
    assert [one.get("class") for one in picture.iter(f"{SVG}circle")].count("fill1") == 3
    assert len(list(picture.iter(f"{SVG}path"))) == 2
