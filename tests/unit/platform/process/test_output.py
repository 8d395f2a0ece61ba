"""The output of a process of Ray: one file for all of it, and the lines in it that are the user's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestray.platform.process.output import Lines, is_of_the_task, join_output, read_output

TALKER = """
import faulthandler, os, sys, warnings
from orchestray.platform.process.output import join_output
path = join_output()
print("first", flush=True)
print("to stderr", file=sys.stderr, flush=True)
os.system("echo child")
print(path, flush=True)
faulthandler.enable()
os.abort()
"""


def test_all_that_a_process_says_goes_into_one_file_in_order_also_a_crash(tmp_path: Path) -> None:
    out, err = tmp_path / "worker-ab-01000000-7.out", tmp_path / "worker-ab-01000000-7.err"
    with out.open("ab") as stdout, err.open("ab") as stderr:
        subprocess.run([sys.executable, "-c", TALKER], stdout=stdout, stderr=stderr, check=False)
    lines = out.read_text().splitlines()
    assert lines[:4] == ["first", "to stderr", "child", str(out)]
    assert "Fatal Python error: Aborted" in lines
    assert err.read_text() == ""


def test_the_output_of_other_processes_is_left_as_it_is(tmp_path: Path) -> None:
    text = "from orchestray.platform.process.output import join_output\nprint([join_output()])"
    with (tmp_path / "mine.out").open("ab") as stdout:
        subprocess.run([sys.executable, "-c", text], stdout=stdout, check=True)
    assert (tmp_path / "mine.out").read_text() == "['']\n"
    assert join_output() == ""


def test_lines_come_when_they_are_complete() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed("o \u00fc".encode()[:-1]) == []
    assert lines.feed("\u00fc".encode()[-1:] + b"\n\nfour") == ["two \u00fc", ""]
    assert lines.end() == ["four"]
    assert lines.end() == []


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"\r 10%|#\r 20%|##", [" 20%|##"]),
        (b"dos\r", ["dos"]),
        (b"\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07x", ["red x"]),
        (b"\xff?", ["\ufffd?"]),
        (b":actor_name:Member", []),
        (b":job_id:01000000", []),
    ],
)
def test_a_line_is_what_a_terminal_would_show(line: bytes, shown: list[str]) -> None:
    assert Lines().feed(line + b"\n") == shown


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[W1126 15:10:51.107004664 socket.cpp:469] [c10d] waitForInput: poll", False),
        ("[rank0]:[W1126 15:10:51.107004664 ProcessGroupGloo.cpp:12] Warning", False),
        ("[Gloo] Rank 0 is connected to 1 peer ranks.", False),
        ("[2026-11-26 15:10:51,107 E 123 456] core_worker.cc:1: gone", False),
        ("[INFO] step 3", True),
        ("[12] is a list", True),
        ("Fatal Python error: Aborted", True),
    ],
)
def test_reports_of_torch_and_ray_are_not_the_tasks(line: str, expected: bool) -> None:
    assert is_of_the_task(line) == expected


def test_a_file_is_read_from_an_offset_and_one_that_is_gone_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123")
    assert [read_output(str(tmp_path / "a"), offset) for offset in (0, 3, 4, 9)] == [b"0123", b"3", b"", b""]
    assert read_output(str(tmp_path / "gone"), 0) == b""
