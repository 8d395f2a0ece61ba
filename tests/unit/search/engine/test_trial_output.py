"""The output of trials: each trial's into its own log, also from a process that dies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestray.search.engine.trial_output import TrialLogs

PROCESS = """
import os, sys
from orchestray.search.engine.trial_output import TrialOutput
output = TrialOutput(sys.argv[1])
output.begin(0)
print("zero", flush=True)
output.begin(1)
output.begin(2)
os.system("echo child")
output.begin(0)
print("zero again", file=sys.stderr, flush=True)
os.abort()
"""


def test_each_trial_has_its_own_log_and_one_that_prints_nothing_has_none_in_the_end(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    subprocess.run([sys.executable, "-c", PROCESS, str(logs)], check=False)
    assert (logs / "trial-1.log").read_text() == ""  # another process may be about to write to it
    TrialLogs(logs, lambda _who, _lines: None).close()
    assert {file.name: file.read_text() for file in logs.iterdir()} == {
        "trial-0.log": "zero\nzero again\n",
        "trial-2.log": "child\n",
    }


def test_what_trials_print_is_shown_once_from_where_an_earlier_attempt_ended(tmp_path: Path) -> None:
    shown: list[tuple[str, list[str]]] = []
    (tmp_path / "trial-0.log").write_text("of the attempt before\n")
    logs = TrialLogs(tmp_path, lambda who, lines: shown.append((who, lines)))
    with (tmp_path / "trial-0.log").open("a") as file:
        file.write("more")
    (tmp_path / "trial-1.log").write_text("one\n")
    (tmp_path / "trial-2.log").write_text("")
    logs.look()
    logs.close()
    assert shown == [("trial 1", ["one"]), ("trial 0", ["more"])]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trial-0.log", "trial-1.log"]


def test_a_log_that_is_removed_while_it_is_looked_at_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trial-0.log").write_text("")
    with os.scandir(tmp_path / "logs") as entries:
        gone = list(entries)
    shutil.rmtree(tmp_path / "logs")
    monkeypatch.setattr(TrialLogs, "_files", lambda _logs: gone)
    logs = TrialLogs(tmp_path / "logs", lambda _who, _lines: None)
    logs.look()
    logs.close()


def test_without_any_output_no_folder_is_left(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trial-0.log").write_text("")
    TrialLogs(tmp_path / "logs", lambda _who, _lines: None).close()
    assert not (tmp_path / "logs").exists()
