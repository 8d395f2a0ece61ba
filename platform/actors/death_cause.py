"""The errors by which Ray reports that a process is gone, and a short cause, extracted from their long texts."""

from __future__ import annotations

import re

from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

LOSSES: tuple[type[RayError], ...] = (
    RayActorError,
    OutOfMemoryError,
    WorkerCrashedError,
    NodeDiedError,
    LocalRayletDiedError,
    ObjectLostError,  # the answer of a process whose machine is gone
)
"""Errors that report the loss of a process or of its machine; any other error of Ray is one of the call itself."""
_MEMORY = re.compile(r"Memory on the node.*? was ([\d.]+)GB(?: used)? / ([\d.]+)GB")
_OWN_MEMORY = re.compile(r"memory used=([\d.]+)GB")
_PLAIN_CAUSES = {
    "Worker unexpectedly exits with a connection error code 2": "its process was killed or crashed",
}


def cause_of(error: BaseException) -> str:
    """Return the short cause given in Ray's long text on a dead actor."""
    text = str(error)
    if memory := _MEMORY.search(text):
        own = f", {used[1]} GB of them by this process" if (used := _OWN_MEMORY.search(text)) else ""
        return f"its machine ran out of memory ({memory[1]} of {memory[2]} GB used{own}), and Ray killed it"
    for line in text.splitlines():
        if "exit type" in line.lower() or "exit detail" in line.lower():
            detail = line.split("detail:", 1)[-1].strip().split(". ")[0].rstrip(".")
            return _PLAIN_CAUSES.get(detail, detail)
    return last_line(error).rstrip(".")


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text as a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".") + "."
