"""What the raylet runs for a worker process of a Ray of our own: it asks the template for a fork, else starts plainly.

A script of the standard library alone, and of little of that: it must not cost what it saves. It is run by its path,
never imported by the driver, and takes the arguments of Ray's own setup_worker.py, to which it gives way wherever
anything is not as in a plain worker on this machine, or the template does not answer.
"""

from __future__ import annotations

import os
import sys

if not sys.flags.safe_path:  # where it is set, Python puts no folder there
    sys.path.pop(0)  # this one, whose names are not meant to hide the standard library's

import marshal
import socket

WORKER = "/ray/_private/workers/default_worker.py"
SOCKET = "worker_template"
"""Beside the raylet's own socket, whose path is among the arguments."""
SURE = b"+"
_DEADLINE_S = 40.0
"""The template may be importing still. A third of what the raylet waits for a worker: a plain start needs the rest."""


def main(arguments: list[str]) -> None:
    """Have a worker with these arguments start; returns once a fork has taken its place, else never."""
    if not forked(arguments):
        worker = next(argument for argument in arguments if argument.endswith(".py"))
        plain = os.path.join(os.path.dirname(worker), "setup_worker.py")  # noqa: PTH118, PTH120 - pathlib costs 10 ms
        os.execv(sys.executable, [sys.executable, plain, *arguments])  # noqa: S606 - as Ray does


def forked(arguments: list[str]) -> bool:
    """Whether the template has put a worker in this process's place."""
    raylet = value(arguments, "--raylet-name")
    if not raylet or not is_plain(arguments):
        return False
    address = os.path.join(os.path.dirname(raylet), SOCKET)  # noqa: PTH118, PTH120
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as template:
            template.settimeout(_DEADLINE_S)
            template.connect(address)
            request = marshal.dumps((arguments, dict(os.environ), own()))
            socket.send_fds(template, [len(request).to_bytes(8, "little")], [0, 1, 2])
            template.sendall(request)
            # The worker waits for an answer to its own: if this process has given up meanwhile, there is none.
            if template.recv(1) != SURE:
                return False
            template.sendall(SURE)
            return True
    except OSError:
        return False


def is_plain(arguments: list[str]) -> bool:
    """Whether nothing is asked for but Ray's worker for Python, in this Python, with this environment."""
    return (
        arguments[0].endswith(WORKER)
        and value(arguments, "--language") == "PYTHON"
        and value(arguments, "--worker-type") in {"", "WORKER"}
        and value(arguments, "--serialized-runtime-env-context") in {"", "{}"}
    )


def own() -> tuple[str, int, int, list[int], str]:
    """What else a process has from its parent: directory, umask, niceness, CPUs, and the score of the OOM killer."""
    umask = os.umask(0o077)
    os.umask(umask)
    with open("/proc/self/oom_score_adj") as file:  # noqa: PTH123
        score = file.read()
    return os.getcwd(), umask, os.nice(0), list(os.sched_getaffinity(0)), score  # noqa: PTH109


def value(arguments: list[str], name: str) -> str:
    """Of `name=value` among the arguments; nothing if it is not there."""
    start = name + "="
    return next((argument[len(start) :] for argument in arguments if argument.startswith(start)), "")


if __name__ == "__main__":
    main(sys.argv[1:])
