"""The calibration of a planner to this machine: a profile measured in processes of their own, if it is quiet enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.machine import kept
from orchestray.trainers.machine.profile import MachineProfile

MOST_SPREAD = 0.25
"""Relative distance of repeats beyond which a machine counts as busy."""
_MEASURE = "orchestray.trainers.machine.measure"
_MEASURE_PROCESS = "orchestray.trainers.machine.measure_process"


class BusyMachineError(OrchestrayError):
    """Raised when a machine does so much else that its times would mislead."""


class CalibrationError(OrchestrayError):
    """Raised when the processes that measure have failed."""


def check_quiet() -> None:
    """Raise BusyMachineError if more processes want to compute than there are cores."""
    load = os.getloadavg()[0]
    if load > kept.cores():
        raise BusyMachineError(
            f"This machine is busy: its load is {load:.1f}, with {kept.cores()} cores. "
            "Wait until it is quiet, or measure all the same with --force."
        )


def check_steady(profile: MachineProfile) -> None:
    """Raise BusyMachineError if repeats of one measurement disagree."""
    if profile.spread > MOST_SPREAD:
        raise BusyMachineError(
            f"This machine was busy: one product of matrices took up to {profile.spread:.0%} longer at one time than "
            "at another. Nothing is kept; calibrate when it is quiet, or keep the numbers all the same with --force."
        )


def calibrate(
    hosted: str, directory: Path | None = None, say: Callable[[str], None] = lambda _: None, *, quick: bool = False
) -> MachineProfile:
    """Measure this machine, in half a minute; nothing is kept.

    Args:
        hosted: import path of what a worker hosts, "module:callable".
        directory: directory whose disk is measured; default: the current one.
        say: gets a line for each part that is done.
        quick: True to measure less: a fifth of the shapes of products, and groups of two processes alone.

    Raises:
        CalibrationError: the processes that measure have failed.
    """
    with tempfile.TemporaryDirectory(prefix="orchestray-calibrate-") as folder:
        out, errors = Path(folder) / "profile.json", Path(folder) / "errors"
        process_bytes = list(_lines([_MEASURE_PROCESS, hosted], errors))[-1]
        say("a worker's process")
        arguments = [str(out), f"{folder}/meeting", str(directory or Path.cwd()), process_bytes]
        for line in _lines([_MEASURE, *arguments, *(["quick"] if quick else [])], errors):
            say(line)
        return MachineProfile.from_json(json.loads(out.read_text(encoding="utf-8")))


def _lines(arguments: Sequence[str], errors: Path) -> Iterator[str]:
    """Run a module, and yield the lines that it prints.

    Raises:
        CalibrationError: it fails.
    """
    command = [sys.executable, "-m", *arguments]
    with errors.open("w") as written, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.decode().strip()
    if process.returncode:
        lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = lines[-1] if lines else "no reason was given"
        raise CalibrationError(f"The measurement failed with exit status {process.returncode}: {reason}")
