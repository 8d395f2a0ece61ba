"""A Ray of our own starts in a process that has imported Ray before, also after Ctrl-C while it started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.cli import outside

_PROGRAM = """
import os
import signal
import threading

import ray

os.environ["RAY_AUTH_MODE"] = "token"  # Ray has read it by now; its servers will read it again

from orchestray.platform.cluster.cluster import connect

start = threading.Thread.start


def interrupted(thread):
    # The driver's C++ is there by now, and Ray has not noted yet that it is.
    if thread.name == "ray_listen_error_messages" and threading.current_thread() is threading.main_thread():
        threading.Thread.start = start
        signal.raise_signal(signal.SIGINT)
    start(thread)


def ended(number, frame): ...


signal.signal(signal.SIGTERM, ended)
threading.Thread.start = interrupted
try:
    connect()
except KeyboardInterrupt:
    print("interrupted")
print(connect().owned, ray.get(ray.put("goes on")), signal.getsignal(signal.SIGTERM) is ended)
"""


def test_ray_starts_though_the_mode_of_authentication_was_set_after_its_import_and_again_after_ctrl_c(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(
        command, cwd=tmp_path, env=outside(), capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("interrupted\nTrue goes on True\n", 0), done.stderr[-2000:]
