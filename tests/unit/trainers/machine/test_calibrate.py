"""Numbers of a busy machine are refused, and a measurement that fails says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestray.trainers.machine import calibrate, kept
from orchestray.trainers.machine.calibrate import BusyMachineError, CalibrationError
from support.profiles import profile


def test_a_machine_with_more_to_do_than_cores_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (kept.cores() + 0.5, 0.0, 0.0))
    with pytest.raises(BusyMachineError, match=f"with {kept.cores()} cores.*--force"):
        calibrate.check_quiet()
    monkeypatch.setattr(os, "getloadavg", lambda: (kept.cores() - 0.5, 99.0, 99.0))
    calibrate.check_quiet()


def test_repeats_that_disagree_are_refused_and_those_that_agree_are_not() -> None:
    calibrate.check_steady(profile(spread=0.1))
    with pytest.raises(BusyMachineError, match=r"up to 60% longer.*Nothing is kept"):
        calibrate.check_steady(profile(spread=0.6))


def test_a_measurement_that_fails_gives_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_MEASURE_PROCESS", "orchestray.nowhere")
    with pytest.raises(CalibrationError, match=r"exit status 1: .*No module named"):
        calibrate.calibrate("nothing:Here", tmp_path)
