"""Timelines: bubbles from recorded times, drawn on the terminal and as a picture, and exported as a trace."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestray.platform.errors import ConfigError, StorageError
from orchestray.platform.report.png import Picture, text_size
from orchestray.platform.report.timeline import Step, choose, read_timeline, time_text, trace, write_trace
from orchestray.platform.report.timeline_picture import timeline_picture, write_timeline_picture
from orchestray.platform.report.timeline_text import draw
from orchestray.platform.run.directory import RunPaths
from support.cli import orchestray
from support.patience import PATIENCE_S

START_S = 1_700_000_000.0


def action(rank: int, text: str, begin_s: float, end_s: float, stage: int | None = None) -> dict[str, Any]:
    """Return an action of a timeline; `text` is kind and micro-batch: F0."""
    kind, micro_batch = text.rstrip("0123456789"), text.lstrip("FBIWUwait")
    return {
        "rank": rank,
        "stage": rank if stage is None else stage,
        "kind": kind,
        "micro_batch": int(micro_batch or -1),
        "begin_s": START_S + begin_s,
        "end_s": START_S + end_s,
    }


GPIPE = [
    # Two micro-batches through two workers, a second forward and two backward; then an update of half a second.
    *[
        action(0, "F0", 0, 1),
        action(0, "F1", 1, 2),
        action(0, "wait", 2, 5),
        action(0, "B0", 5, 7),
        action(0, "B1", 7, 9),
    ],
    *[
        action(1, "F0", 1, 2),
        action(1, "F1", 2, 3),
        action(1, "B0", 3, 5),
        action(1, "B1", 5, 7),
        action(1, "wait", 7, 9),
    ],
    *[action(0, "U", 9, 10), action(1, "U", 9, 10)],
]


def record(path: Path, steps: Mapping[int, Sequence[Mapping[str, Any]]]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    data = {"steps": [{"step": step, "actions": actions} for step, actions in steps.items()]}
    RunPaths(path).timeline.write_text(json.dumps(data))
    return path


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return read_timeline(record(tmp_path / "a", {4: GPIPE}))[0]


def plain(step: Step, width: int = 80) -> list[str]:
    return [line.plain for line in draw(step, width=width)]


def test_the_bubble_is_the_part_of_the_passes_time_in_which_a_worker_does_none(step: Step) -> None:
    assert step.span_s == 9
    assert [row.busy_s for row in step.rows] == [6, 6]
    assert [row.bubble for row in step.rows] == [1 - 6 / 9] * 2
    assert step.bubble == pytest.approx(1 / 3, rel=1e-15)
    assert (step.begin_s, step.end_s) == (START_S, START_S + 10)  # the update is drawn, and in no bubble


def test_a_row_has_as_many_cells_for_an_action_as_it_took_time(step: Step) -> None:
    lines = plain(step, width=len("worker 0  stage 0 │") + 50 + len("│  33.3%"))  # 50 cells for 10 seconds
    assert lines[0] == "step 4   10.0 s   bubble 33.3%"
    assert lines[2] == "worker 0  stage 0 │0░░░░1░░░░               0█████████1█████████═════│  33.3%"
    assert lines[3] == "worker 1  stage 1 │     0░░░░1░░░░0█████████1█████████          ═════│  33.3%"
    assert lines[5] == " " * 19 + "0" + "10.0 s".rjust(49)
    assert [line.strip() for line in lines[6:]] == ["0 micro-batch 0  ░░ forward  ██ backward  ══ update"]


@pytest.mark.parametrize("width", [60, 80, 133])
def test_no_line_is_wider_than_the_terminal_and_the_rows_are_as_wide(tmp_path: Path, width: int) -> None:
    actions = [
        action(rank, f"{kind}{each}", (40 * turn + each) / 7 + rank, (40 * turn + each + 1) / 7 + rank, stage)
        for turn, (kind, stage_of) in enumerate([("F", 0), ("F", 1), ("I", 1), ("W", 1), ("B", 0)])
        for each in range(40)
        for rank in range(12)
        for stage in [rank + 12 * stage_of]
    ]
    lines = plain(read_timeline(record(tmp_path / "a", {1: actions}))[0], width)
    assert {len(line) for line in lines[2:14]} == {width}
    assert max(map(len, lines)) == width
    legend = " ".join(line.strip() for line in lines[16:])
    assert all(name in legend for name in ("forward", "backward ", "backward of the input", "backward of the weights"))


def test_without_colours_no_number_hides_which_pass_an_action_is(tmp_path: Path) -> None:
    narrow = [action(0, f"{'FB'[each % 2]}{each // 2}", each, each + 1) for each in range(40)]  # a cell or two each
    step = read_timeline(record(tmp_path / "a", {1: narrow}))[0]
    row = plain(step)[2]
    bar = row[row.index("│") + 1 : row.rindex("│")]
    assert (bar.count("░") >= 20, bar.count("█") >= 20) == (True, True)
    with_colour = draw(step, width=80, has_colour=True)[2].plain
    assert sum(map(str.isdigit, with_colour)) > sum(map(str.isdigit, row))


def test_kinds_have_colours_of_their_own_and_later_stages_brighter_ones(tmp_path: Path) -> None:
    actions = [action(0, "F0", 0, 1, stage=0), action(0, "F0", 1, 2, stage=3), action(0, "B0", 2, 3, stage=3)]
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="standard", width=80)
    for line in draw(read_timeline(record(tmp_path / "a", {1: actions}))[0], has_colour=True):
        console.print(line)
    row = output.getvalue().splitlines()[2]
    assert row.index("\x1b[34m░") < row.index("\x1b[94m░") < row.index("\x1b[93m█")


def test_what_took_no_time_at_all_is_drawn_without_complaint(tmp_path: Path) -> None:
    step = read_timeline(record(tmp_path / "a", {1: [action(0, "F0", 1, 1), action(1, "U", 1, 1)]}))[0]
    assert (step.span_s, step.bubble) == (0, 0)
    assert len({len(line) for line in plain(step)[2:4]}) == 1
    assert timeline_picture(step, "a").png()


def test_the_last_step_is_chosen_or_the_one_that_is_asked_for(tmp_path: Path) -> None:
    steps = read_timeline(record(tmp_path / "a", {9: GPIPE, 8: GPIPE, 10: []}))
    assert (choose(steps, None).step, choose(steps, 8).step) == (9, 8)
    with pytest.raises(ConfigError, match=r"step 3 is not in the timeline.*choose one of 8, 9"):
        choose(steps, 3)


def test_a_run_without_a_timeline_says_which_have_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match=r"'a' has no timeline: runs with .*pipeline > 1 record one; in .* none has"):
        read_timeline(tmp_path / "a")
    record(tmp_path / "c", {1: GPIPE})
    record(tmp_path / "b", {1: GPIPE})
    record(tmp_path / "a", {})
    with pytest.raises(ConfigError, match=r"these have: b, c$"):
        read_timeline(tmp_path / "a")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"steps": [{"step": 1}]}',
        '{"steps": [{"step": 1, "actions": [{"rank": 0, "kind": "F"}]}]}',
        '{"steps": [{"step": 1, "actions": [{"rank": 0, "kind": "F", "begin_s": 2, "end_s": 1}]}]}',
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    RunPaths(tmp_path).timeline.write_text(text)
    with pytest.raises(StorageError, match=f"could not read {RunPaths(tmp_path).timeline}: it is no"):
        read_timeline(tmp_path)


def test_a_trace_has_a_track_a_worker_and_microseconds_from_the_first_action(tmp_path: Path) -> None:
    later = [{**each, "begin_s": each["begin_s"] + 20, "end_s": each["end_s"] + 20} for each in GPIPE]
    steps = read_timeline(record(tmp_path / "a", {1: GPIPE, 2: later}))
    write_trace(steps, "digits", tmp_path / "trace.json")
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read == trace(steps, "digits")
    events = read["traceEvents"]
    named = {(event["name"], event.get("tid")): event["args"] for event in events if event["ph"] == "M"}
    assert named["process_name", None] == {"name": "digits"}
    assert [named["thread_name", rank]["name"] for rank in (0, 1)] == ["worker 0", "worker 1"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 2 * 10  # waiting is not an event
    first, last = complete[1], complete[-1]
    assert (first["tid"], first["name"], first["ts"], first["dur"]) == (0, "forward 1", 1e6, 1e6)
    assert first["args"] == {"step": 1, "stage": 0, "micro_batch": 1}
    assert (last["tid"], last["name"], last["ts"], last["args"]["step"]) == (1, "update", 29e6, 2)


def pixels(png: bytes) -> list[list[tuple[int, ...]]]:
    """Return the pixels of a PNG of ours, read back by the standard."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + data),)
        chunks[kind], at = data, at + 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colours = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colours) == (8, 2)
    raw, line = zlib.decompress(chunks[b"IDAT"]), 1 + 3 * width
    assert len(raw) == height * line
    rows = [raw[y * line : (y + 1) * line] for y in range(height)]
    assert {row[0] for row in rows} == {0}
    return [[tuple(row[1 + 3 * x : 4 + 3 * x]) for x in range(width)] for row in rows]


def test_a_picture_is_a_png_with_what_was_drawn() -> None:
    picture = Picture(12, 9)
    picture.rectangle(10, -5, 99, 2, (1, 2, 3))
    picture.text(0, 0, "1", (0, 0, 0), size=1)
    found = pixels(picture.png())
    assert [[x for x in range(12) if found[y][x] == (1, 2, 3)] for y in (1, 2)] == [[10, 11], []]
    ink = ["".join("#" if found[y][x] == (0, 0, 0) else "." for x in range(5)) for y in range(8)]
    assert ink == ["..#..", ".##..", "..#..", "..#..", "..#..", "..#..", ".###.", "....."]
    assert text_size("12", 2) == (22, 14)


def test_a_timelines_picture_has_boxes_as_long_as_the_actions(step: Step, tmp_path: Path) -> None:
    write_timeline_picture(step, "digits/µ!", tmp_path / "a.png")
    found = pixels((tmp_path / "a.png").read_bytes())
    rows = [row for row in found if (76, 126, 190) in row and (235, 162, 60) in row]
    first, last = rows[2], rows[-60]  # a line through the boxes of worker 0, and one through those of worker 1
    length = {colour: first.count(colour) for colour in ((76, 126, 190), (235, 162, 60), (120, 130, 136))}
    per_s = (length[120, 130, 136] + 1) / 1  # an edge of one pixel belongs to each box
    assert length[76, 126, 190] + 2 == pytest.approx(2 * per_s, abs=3)
    assert length[235, 162, 60] + 2 == pytest.approx(4 * per_s, abs=4)
    assert first.index((76, 126, 190)) + per_s == pytest.approx(last.index((76, 126, 190)), abs=2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 µs"),
        (8.3e-4, "830 µs"),
        (0.0124, "12.4 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (125.0, "125 s"),
    ],
)
def test_times_have_three_digits_and_their_unit(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def make_run(runs_dir: Path, name: str, steps: Mapping[int, Sequence[Mapping[str, Any]]] | None) -> None:
    (runs_dir / name).mkdir(parents=True)
    config = "name: x\ntask: {type: digits}\ntrain: {batch_size: 8, steps: 1, optimizer: {type: sgd, lr: 0.1}}\n"
    (runs_dir / name / "config.yaml").write_text(config)
    if steps is not None:
        record(runs_dir / name, steps)


def test_the_command_draws_a_runs_timeline_and_writes_the_files_it_is_asked_for(tmp_path: Path) -> None:
    make_run(tmp_path, "piped", {3: GPIPE, 4: GPIPE})
    png, json_file = tmp_path / "t.png", tmp_path / "t.json"
    done = orchestray("runs", "show", "piped", "--runs-dir", tmp_path, "--timeline", "--png", png, "--trace", json_file)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "step 4   10.0 s   bubble 33.3%"
    assert lines[2].startswith("worker 0  stage 0 │0░░░░1░░░░")
    assert lines[-2:] == [f"Wrote {json_file}.", f"Wrote {png}."]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "traceEvents" in json.loads(json_file.read_text())


def test_the_commands_json_has_the_bubble_of_each_worker(tmp_path: Path) -> None:
    make_run(tmp_path, "piped", {3: GPIPE, 4: GPIPE})
    done = orchestray("runs", "show", "piped", "--runs-dir", tmp_path, "--step", "3", "--json")
    answer = json.loads(done.stdout)
    assert (answer["step"], answer["span_s"], answer["bubble"]) == (3, 9.0, pytest.approx(1 / 3))
    assert answer["workers"][1] == {"rank": 1, "stages": [1], "busy_s": 6.0, "bubble": pytest.approx(1 / 3)}


def test_the_command_answers_for_a_run_without_a_timeline_with_a_sentence(tmp_path: Path) -> None:
    make_run(tmp_path, "plain", None)
    make_run(tmp_path, "piped", {3: GPIPE})
    done = orchestray("runs", "show", "plain", "--runs-dir", tmp_path, "--timeline")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith("these have: piped")
    assert "Traceback" not in done.stderr


def test_timelines_are_read_and_drawn_without_torch_and_without_trainers() -> None:
    code = (
        "import sys, orchestray.platform.report.timeline_text, orchestray.platform.report.timeline_picture\n"
        "sys.exit(any(name == 'torch' or name.startswith('orchestray.trainers') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
