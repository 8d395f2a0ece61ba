from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from orchestray.platform.terminal.progress import Display, Progress, View

RESULT = {
    "status": "succeeded",
    "steps": 460,
    "epochs": 20,
    "seconds": 67.2,
    "time_to_first_step_s": 4.21,
    "samples_per_s": 41234.3,
    "final": {"train": {"loss": 0.0312}, "validation": {"accuracy": 0.9722, "loss": 0.1012}},
    "bytes": {"sent": 123_456_789, "dense": 1},
    "restarts": 1,
    "error": None,
}

DEMO = """
from pathlib import Path
from orchestray.platform.terminal.progress import Progress
with Progress(name="digits", directory=Path("runs/digits").absolute()) as progress:
    progress.set_total(460)
    progress.event("worker 1 lost: killed by SIGKILL")
    for step in range(1, 231):
        progress.update({"step": step, "epoch": 2, "time_s": step / 10, "loss": 0.25, "lr": 0.1, "samples_per_s": 3e4})
    progress.update({"step": 230, "split": "validation", "accuracy": 0.9611})
    import threading; threading.Event().wait(0.5)
    progress.finish(RESULT)
""".replace("RESULT", repr(RESULT))


def test_without_a_terminal_there_are_plain_lines() -> None:
    outcome = subprocess.run([sys.executable, "-c", DEMO], capture_output=True, text=True, check=True)
    assert outcome.stdout == ""
    assert outcome.stderr.splitlines() == [
        "digits: worker 1 lost: killed by SIGKILL",
        "digits: step 230/460  validation: accuracy 0.9611  (train loss 0.25)",
        "digits: succeeded",
        "digits:   steps       460  (20 epochs)",
        "digits:   train       loss 0.0312",
        "digits:   validation  accuracy 0.9722  loss 0.1012",
        "digits:   time        1:07 min  (first step after 4.2 s)",
        "digits:   speed       41,234 samples/s",
        "digits:   sent        123 MB",
        "digits:   restarts    1",
        "digits:   run         runs/digits",
    ]


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text)


def on_terminal(script: str) -> str:
    """Return what a script shows on a terminal of 80 columns."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=terminal, stderr=terminal, stdin=terminal, env=environment
    ) as process:
        os.close(terminal)
        shown = b""
        try:
            while piece := os.read(controller, 65536):
                shown += piece
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(controller)
    assert process.returncode == 0, shown.decode()
    return shown.decode()


def test_on_a_terminal_there_is_a_live_display_and_a_closing_table() -> None:
    shown = without_escapes(on_terminal(DEMO))
    for text in ("worker 1 lost", "step 230/460", "23 s left", "30,000 samples/s", "accuracy 0.9611", "succeeded"):
        assert text in shown
    assert shown.rstrip().endswith("╯")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_shows_nothing(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal)
    with Progress(name="a", quiet=True, console=console) as progress:
        progress.update({"step": 1, "loss": 1.0})
        progress.event("something")
        progress.finish(RESULT)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_quiet_still_shows_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(name="a", quiet=True) as progress:
        progress.event("worker 1 lost: killed")
        progress.warn("the checkpoint is damaged")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "a: warning: the checkpoint is damaged\n")


def test_no_line_is_wider_than_the_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    view = View("a-name-that-is-much-longer-than-anyone-would-like", total_steps=123_456_789)
    view.restarts = 3
    console.print(Display(view))
    for step in (1_234_567, 1_234_568):
        view.update(
            {"step": step, "epoch": 1234, "time_s": step / 10, "loss": 12345.678, "lr": 1.234e-7, "samples_per_s": 1e9}
        )
    view.update({"step": 9, "split": "validation", **{f"metric_{n}": 0.123456 for n in range(9)}})
    console.print(Display(view))
    assert isinstance(console.file, io.StringIO)
    # Narrower still: a terminal echoes "^C" behind the last line, which must not wrap.
    assert max(map(len, without_escapes(console.file.getvalue()).splitlines())) <= 76
    with Progress(name=view.name, console=console) as progress:
        progress.event("a long sentence about what happened, " * 4)
        progress.finish({**RESULT, "error": "a long sentence about what went wrong, " * 4})
    lines = without_escapes(console.file.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("step 1,234,568/123,456,789" in line for line in lines) == 1


def test_markup_in_a_text_is_shown_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=80)
    with Progress(name="[bold]", console=console) as progress:
        progress.event("tensor [3, 4] in [/tmp/x]")
        progress.finish({"status": "failed", "error": "[red]"})
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "[bold]: tensor [3, 4] in [/tmp/x]",
        "[bold]: failed",
        "[bold]:   error       [red]",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_of_a_process_are_shown_as_they_are_with_its_name(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=40)
    with Progress(name="a", console=console) as progress:
        progress.said("worker 0", ["[red]" + "x" * 50, "  indented"])
        progress.said("", ["... 3 more lines"])
    assert isinstance(console.file, io.StringIO)
    shown = without_escapes(console.file.getvalue()).replace("\n", "" if is_terminal else "\na: ")
    for line in ("worker 0: [red]" + "x" * 50, "worker 0:   indented", "... 3 more lines"):
        assert line in shown


def test_an_event_may_come_from_a_signal_handler() -> None:
    console = Console(file=io.StringIO())
    with Progress(name="a", console=console) as progress:
        before = signal.signal(signal.SIGUSR1, lambda *_: progress.event("signal"))
        try:
            for _ in range(200):
                progress.event("plain")
                signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines().count("a: signal") == 200


def test_the_time_left_follows_the_pace_of_the_last_steps() -> None:
    view = View("a", total_steps=100)
    assert view.left_s is None
    for step in range(1, 11):
        view.update({"step": step, "time_s": 100.0 + step * 2})
    assert view.left_s == pytest.approx(90 * 2)
    # Back to a checkpoint: the pace is measured from there, and the pause does not count.
    view.update({"step": 5, "time_s": 300.0})
    assert view.left_s is None
    view.update({"step": 6, "time_s": 301.0})
    assert view.left_s == pytest.approx(94)
