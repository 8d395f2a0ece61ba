"""A Ray of our own starts on a machine that is busy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.cli import outside, python_path
from support.patience import PATIENCE_S

_HELD_AGENT = """
import sys, time
from pathlib import Path
words = Path("/proc/self/cmdline").read_bytes().split(b"\\0")
if any(word.endswith(b"dashboard/agent.py") for word in words):
    Path({seen!r}).touch()
    while not Path({released!r}).exists():
        time.sleep(0.05)
"""
_CONNECT = """
import pathlib, sys, time
from orchestray.platform.cluster.cluster import connect
cluster = connect()
seen, released = map(pathlib.Path, sys.argv[1:])
while not seen.exists():
    time.sleep(0.05)
released.touch()
cluster.close()
"""


def test_ray_is_there_before_its_agent_which_imports_for_long(tmp_path: Path) -> None:
    seen, released = tmp_path / "seen", tmp_path / "released"
    (tmp_path / "sitecustomize.py").write_text(_HELD_AGENT.format(seen=str(seen), released=str(released)))
    done = subprocess.run(
        [sys.executable, "-c", _CONNECT, seen, released],
        env={**outside(), "PYTHONPATH": python_path(tmp_path), "ORCHESTRAY_FORK_WORKERS": "0"},  # as it costs less
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
