"""Stacks of other processes: read where that can be done, and a sentence where not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestray.platform.process.stacks import read_stacks

CODE = "def lost_in_thought():\n    print('there', flush=True)\n    input()\nlost_in_thought()"


def test_a_process_that_is_stopped_is_read_and_stays_as_it_is() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert "lost_in_thought (" in read_stacks(process.pid)
            assert Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        finally:
            process.kill()


def test_a_refusal_of_py_spy_is_given_in_its_words() -> None:
    text = read_stacks(2**22 + 1)  # beyond the largest id of a process
    assert text.startswith("The stacks could not be read: py-spy says\nError: ")


def test_a_machine_without_py_spy_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert read_stacks(os.getpid()).startswith("The stacks could not be read: py-spy, which comes with ray[default]")
