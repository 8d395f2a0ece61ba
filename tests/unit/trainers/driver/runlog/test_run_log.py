"""Records that a driver keeps of a run as its lines come in."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress


def test_a_loss_that_is_no_number_is_told_once_for_steps_and_once_for_validations(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        run_log = RunLog(RunProgress(time.time()), writer, Progress(name="run", quiet=True))
        for step, loss in enumerate((0.5, math.inf, math.nan, math.nan), start=1):
            run_log.record([{"step": step, "time_s": 0.1, "loss": loss}])
            run_log.record([{"step": step, "time_s": 0.1, "split": "validation", "loss": loss, "accuracy": 0.1}])
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    texts = [line["text"].partition(";")[0] for line in lines if line["event"] == "warning"]
    assert texts == ["the loss of step 2 is inf", "the validation loss of step 2 is inf"]


@pytest.mark.parametrize("hears_of_later_steps", [False, True])
def test_the_first_step_after_a_meeting_ends_the_recovery_however_its_line_comes(
    hears_of_later_steps: bool, tmp_path: Path
) -> None:
    def line(step: int, time_s: float) -> dict[str, Any]:
        return {"step": step, "time_s": time_s, "loss": 1.0}

    progress = RunProgress(time.time() - 10.0)
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        run_log = RunLog(progress, writer, Progress(name="run", quiet=True))
        progress.goodput.begin(0.0)
        run_log.record([line(step, 0.1 * step) for step in range(1, 4)])
        progress.lost_at_s = 0.55
        later = [line(6, 9.0), line(7, 9.1)]
        # The survivor had done steps 4 and 5, the last of them after the loss was seen.
        run_log.fetch_copies = lambda step: [line(4, 0.5), line(5, 0.6), *(later if hears_of_later_steps else [])]
        run_log.record([{"event": "agreed", "step": 5, "time_s": 0.7, "lines": []}])
        run_log.record(later)
    events = [json.loads(each) for each in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "recovered"] == [6]
    goodput = progress.goodput.value(10.0, is_recovering=False)
    assert goodput is not None
    assert goodput < 0.2
