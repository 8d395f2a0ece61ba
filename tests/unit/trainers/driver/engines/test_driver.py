"""Checkpoints that a driver finds to go on from."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from orchestray.platform.run.checkpoint import CheckpointWriter
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress
from orchestray.trainers.driver.engines.driver import latest_checkpoint
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress


def test_a_damaged_checkpoint_is_an_event_with_its_name_and_reason_and_a_warning_though_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "checkpoints"
    with CheckpointWriter(storage, 3) as checkpoints:
        for step in (1, 2):
            checkpoints.save_async(step, {"w": torch.full((8,), float(step))}, {}, {"step": step})
    (storage / "step-00000002" / "model.safetensors").write_bytes(b"")
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        run_log = RunLog(RunProgress(time.time()), writer, Progress(name="run", quiet=True))
        found = latest_checkpoint(str(storage), run_log)
    assert found.step == 1
    (event,) = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert (event["event"], event["checkpoint"]) == ("checkpoint_skipped", "step-00000002")
    assert "model.safetensors" in event["reason"]
    warning = capsys.readouterr().err
    assert warning.startswith("run: warning: checkpoint step-00000002 is damaged (")
    assert "using step-00000001" in warning
