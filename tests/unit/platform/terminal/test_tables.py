"""Tables on a terminal, and in a file or a pipe."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from orchestray.cli import jobs
from orchestray.platform.jobs.submit import Job
from orchestray.platform.terminal import tables

COMMAND = "train /home/user/configs/train/digits.yaml " + " ".join(f"task.hidden=[{width}]" for width in range(30))
JOBS = [
    Job("raysubmit_BzDF1XTZhrKFqki1", "succeeded", COMMAND, 1.7e9, 63.0, 0, ""),
    Job("raysubmit_KLRW7Vu9XJ1vrx8C", "failed", "runs\n  list", 1.7e9, None, None, ""),
]


def test_in_a_pipe_a_job_is_one_line_with_its_whole_command_and_nothing_after_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs._print_table(JOBS)
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["job", "status", "exit", "started", "took", "command"]
    assert first.endswith(COMMAND)
    assert second.endswith("  runs list")


def test_on_a_terminal_a_job_is_one_line_and_its_command_ends_with_an_ellipsis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    show = tables.show
    monkeypatch.setattr(tables, "show", lambda what: show(what, screen))
    jobs._print_table(JOBS)
    assert isinstance(screen.file, io.StringIO)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in screen.file.getvalue().splitlines()]
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("raysubmit_BzDF1XTZhrKFqki1  succeeded     0  ")
    assert lines[1].endswith("…")
    assert "train /home" in lines[1]
