"""Ctrl-C while Ray starts: the process can go on with Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import signal
import threading

import ray

from orchestray.platform.cluster.cluster import connect

start = threading.Thread.start


def interrupted(thread):
    # The driver's C++ is there by now, and Ray has not noted yet that it is.
    if thread.name == "ray_listen_error_messages" and threading.current_thread() is threading.main_thread():
        threading.Thread.start = start
        signal.raise_signal(signal.SIGINT)
    start(thread)


threading.Thread.start = interrupted
try:
    connect()
except KeyboardInterrupt:
    print("interrupted")
print(connect().owned, ray.get(ray.put("goes on")))
"""


def test_a_process_that_was_interrupted_while_ray_started_can_use_ray(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("interrupted\nTrue goes on\n", 0), done.stderr[-2000:]
