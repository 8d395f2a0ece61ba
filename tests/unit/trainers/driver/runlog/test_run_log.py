"""Records that a driver keeps of a run as its lines come in."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

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
