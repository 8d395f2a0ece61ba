"""Goodput: which part of a run's time was that of steps that counted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress
from orchestray.trainers.driver.runlog.goodput import Goodput
from orchestray.trainers.driver.runlog.result import failed
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress


def begun(steps: int, *, began_s: float = 10.0) -> tuple[Goodput, float]:
    """Return the clock of a run whose steps take a second each, and the time at which the last of them ended."""
    goodput = Goodput()
    goodput.begin(began_s)
    for step in range(1, steps + 1):
        goodput.complete(began_s + step, after_loss=False)
    return goodput, began_s + steps


def test_without_a_loss_all_time_counts_also_that_of_validations_and_of_the_end() -> None:
    goodput, now_s = begun(5)
    goodput.complete(now_s + 7.0, after_loss=False)  # a validation lies before it
    assert goodput.value(now_s + 9.0, is_recovering=False) == 1.0


def test_after_a_loss_one_median_step_counts_and_the_wait_does_not() -> None:
    goodput, now_s = begun(5)
    goodput.complete(now_s + 5.0, after_loss=True)
    assert goodput.value(now_s + 5.0, is_recovering=False) == 0.6  # 6 of 10 seconds
    assert goodput.value(now_s + 10.0, is_recovering=False) == pytest.approx(11 / 15, abs=1e-4)


def test_a_step_that_is_done_again_counts_once() -> None:
    goodput, now_s = begun(10)
    goodput.go_back(now_s - 4.0)  # steps 7 to 10 will be done again
    now_s += 2.0
    for step in range(4):
        goodput.complete(now_s + 1.0 + step, after_loss=step == 0)
    assert goodput.value(now_s + 4.0, is_recovering=False) == 0.625  # 10 of 16 seconds


def test_a_recovery_whose_steps_are_done_again_is_not_lost_twice() -> None:
    goodput, now_s = begun(5)
    goodput.complete(now_s + 5.0, after_loss=True)
    goodput.go_back(now_s)
    goodput.complete(now_s + 15.0, after_loss=True)
    assert goodput.value(now_s + 15.0, is_recovering=False) == 0.3  # 6 of 20 seconds


def test_going_back_to_the_first_step_leaves_nothing_that_counted() -> None:
    goodput, now_s = begun(4)
    goodput.go_back(None)
    goodput.complete(now_s + 1.0, after_loss=False)
    assert goodput.value(now_s + 1.0, is_recovering=False) == 0.2


def test_the_time_since_a_loss_that_nobody_recovered_from_is_lost() -> None:
    goodput, now_s = begun(3)
    assert goodput.value(now_s + 3.0, is_recovering=True) == 0.5


def test_before_the_first_step_and_for_lines_of_an_earlier_command_there_is_none() -> None:
    goodput = Goodput()
    goodput.complete(3.0, after_loss=False)
    assert goodput.value(4.0, is_recovering=False) is None
    goodput.begin(5.0)
    assert goodput.value(6.0, is_recovering=False) is None
    goodput.complete(7.0, after_loss=False)
    assert goodput.value(9.0, is_recovering=False) == 1.0


def line(step: int, time_s: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 1, "time_s": time_s, "loss": 1.0, **more}


def test_a_run_that_goes_back_to_its_checkpoint_has_the_goodput_of_the_lines_that_are_left(tmp_path: Path) -> None:
    progress = RunProgress(time.time() - 40.0)
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        run_log = RunLog(progress, writer, Progress(name="run", quiet=True))
        sizes = {"samples": 64, "parameters": 3, "total_steps": 8, "steps_per_epoch": 8}
        run_log.announce(sizes, 8, resumed=False, workers=2)
        began_s = progress.now_s() - 20.0
        progress.goodput.begin(began_s)
        run_log.record([line(step, began_s + step) for step in range(1, 7)])
        run_log.record([line(4, began_s + 4.5, split="validation")])
        progress.lost_at_s = began_s + 6.5
        run_log.record([{"event": "agreed", "step": 4, "lines": []}])
        run_log.record([line(step, began_s + 8 + step) for step in range(5, 9)])
    # Of 20 seconds the time from step 4 to its repetition is lost, but for a step: 13 - 4 - 1.
    assert failed(progress, "succeeded", None)["goodput"] == pytest.approx(12 / 20, abs=0.01)
