"""The script that our raylet runs for a worker: it asks the template for a fork, or else starts the worker normally.

It imports only a small part of the standard library, because it must not cost what it saves. The raylet runs it by its
path, with the arguments of Ray's own setup_worker.py; the driver never imports it. It falls back to setup_worker.py if
the worker is not a plain one on this machine, or if the template does not answer.
"""

from __future__ import annotations

import os
import sys

if not sys.flags.safe_path:  # if it is set, Python adds no folder there
    sys.path.pop(0)  # this folder, whose names must not hide the standard library's

import marshal
import socket

WORKER = "/ray/_private/workers/default_worker.py"
SOCKET = "worker_template"
"""Name of the template's socket, in the folder of the raylet's socket, whose path is among the arguments."""
SURE = b"+"
_DEADLINE_S = 40.0
"""Time the template has to answer: a third of the raylet's limit for a worker, as a plain start needs the rest."""


def main(arguments: list[str]) -> None:
    """Start a worker with these arguments: return once a fork has taken over, otherwise never return."""
    if not forked(arguments):
        worker = next(argument for argument in arguments if argument.endswith(".py"))
        plain = os.path.join(os.path.dirname(worker), "setup_worker.py")  # noqa: PTH118, PTH120 - pathlib costs 10 ms
        os.execv(sys.executable, [sys.executable, plain, *arguments])  # noqa: S606 - as Ray does


def forked(arguments: list[str]) -> bool:
    """Return True if the template has forked a worker that takes over from this process."""
    raylet, variables = value(arguments, "--raylet-name"), variables_of(arguments)
    if not raylet or variables is None or not is_plain(arguments):
        return False
    address = os.path.join(os.path.dirname(raylet), SOCKET)  # noqa: PTH118, PTH120
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as template:
            template.settimeout(_DEADLINE_S)
            template.connect(address)
            request = marshal.dumps((arguments, {**os.environ, **variables}, own()))
            socket.send_fds(template, [len(request).to_bytes(8, "little")], [0, 1, 2])
            template.sendall(request)
            # The worker waits for this confirmation: if this process has given up meanwhile, the worker ends.
            if template.recv(1) != SURE:
                return False
            template.sendall(SURE)
            return True
    except OSError:
        return False


def is_plain(arguments: list[str]) -> bool:
    """Return True if the request is for Ray's plain Python worker."""
    return (
        arguments[0].endswith(WORKER)
        and value(arguments, "--language") == "PYTHON"
        and value(arguments, "--worker-type") in {"", "WORKER"}
    )


def variables_of(arguments: list[str]) -> dict[str, str] | None:
    """Return the variables of the worker's runtime environment; None if that asks for anything else."""
    serialized = value(arguments, "--serialized-runtime-env-context")
    if serialized in {"", "{}"}:
        return {}
    import json

    context = json.loads(serialized)
    variables: dict[str, str] = context.pop("env_vars", {})
    is_same_python = context.pop("py_executable", sys.executable) == sys.executable
    needs_expansion = any("$" in text for text in variables.values())
    return None if any(context.values()) or not is_same_python or needs_expansion else variables


def own() -> tuple[str, int, int, list[int], str]:
    """Return what a process inherits besides: directory, umask, niceness, CPUs, and the OOM killer's score."""
    umask = os.umask(0o077)
    os.umask(umask)
    with open("/proc/self/oom_score_adj") as file:  # noqa: PTH123
        score = file.read()
    return os.getcwd(), umask, os.nice(0), list(os.sched_getaffinity(0)), score  # noqa: PTH109


def value(arguments: list[str], name: str) -> str:
    """Return the value of `name=value` among the arguments; empty if it is missing."""
    start = name + "="
    return next((argument[len(start) :] for argument in arguments if argument.startswith(start)), "")


if __name__ == "__main__":
    main(sys.argv[1:])
