"""What a driver writes down of a run as its lines come in."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.progress import Progress
from orchestray.platform.run.writer import RunWriter
from orchestray.trainers.driver.story import Book, Story


def test_a_loss_that_is_no_number_is_told_once_for_steps_and_once_for_validations(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        book = Book(Story(time.time()), writer, Progress(name="run", quiet=True))
        for step, loss in enumerate((0.5, math.inf, math.nan, math.nan), start=1):
            book.record([{"step": step, "time_s": 0.1, "loss": loss}])
            book.record([{"step": step, "time_s": 0.1, "split": "validation", "loss": loss, "accuracy": 0.1}])
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    texts = [line["text"].partition(";")[0] for line in lines if line["event"] == "warning"]
    assert texts == ["the loss of step 2 is inf", "the validation loss of step 2 is inf"]
