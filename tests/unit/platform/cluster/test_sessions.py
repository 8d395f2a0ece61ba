"""Session folders of ended Rays of our own go, all but the last few; others stay."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from orchestray.platform.cluster.sessions import hold, tidy

HOLDER = """
import sys, pathlib
from orchestray.platform.cluster.sessions import hold

lock = hold(pathlib.Path(sys.argv[1]))
print(lock is not None, flush=True)
sys.stdin.read()
"""


def session(folder: Path, number: int) -> Path:
    made = folder / f"session_2026-01-01_00-00-{number:02}_{number}"
    (made / "logs").mkdir(parents=True)
    return made


def ended(folder: Path, number: int) -> Path:
    made = session(folder, number)
    lock = hold(made)
    assert lock is not None
    lock.close()
    return made


def test_folders_of_ended_sessions_go_all_but_the_last(tmp_path: Path) -> None:
    folders = [ended(tmp_path, number) for number in range(5)]
    tidy(tmp_path, kept=2)
    assert [folder.exists() for folder in folders] == [False, False, False, True, True]


def test_sessions_of_others_stay(tmp_path: Path) -> None:
    others = session(tmp_path, 0)
    tidy(tmp_path, kept=0)
    assert others.exists()


def test_a_session_in_use_stays_until_its_process_is_gone_in_any_way(tmp_path: Path) -> None:
    used = session(tmp_path, 0)
    command = [sys.executable, "-c", HOLDER, str(used)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        tidy(tmp_path, kept=0)
        assert used.exists()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    tidy(tmp_path, kept=0)
    assert not used.exists()


def test_a_folder_that_is_not_there_is_not_an_error(tmp_path: Path) -> None:
    assert hold(tmp_path / "nowhere") is None
    tidy(tmp_path / "nowhere")
