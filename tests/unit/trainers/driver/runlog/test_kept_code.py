"""A run keeps the code that it was begun with, and says which files have changed when it goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.driver.runlog.kept_code import keep_code
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress
from orchestray.trainers.saved.run import load_run

TASK = """
from net import build
class Mine:
    def build_model(self): return build()
    def dataset(self, split): return split
    def to_batch(self, columns): return columns
    def loss(self, outputs, batch): return 0
    def metrics(self, outputs, batch): return {}
"""


def test_a_run_keeps_its_code_and_tells_which_files_have_changed_since(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "net.py").write_text("def build(): return 'first'")
    (tmp_path / "lion.py").write_text("class Lion: pass")
    train = {"batch_size": 2, "epochs": 1, "optimizer": {"type": f"{tmp_path}/lion.py:Lion", "lr": 0.1}}
    config = load_train_config({"name": "run", "task": {"type": f"{tmp_path}/task.py:Mine"}, "train": train})
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        directory.write_config(dump_yaml(config))

        def go_on() -> None:
            settings = ReplicaSettings.from_config(config, storage="", model_directory="")
            keep_code(directory, settings, RunLog(RunProgress(time.time()), writer, Progress(name="run", quiet=True)))

        go_on()
        go_on()  # nothing has changed: nothing is said
        (tmp_path / "net.py").write_text("def build(): return 'second'")
        assert _built(tmp_path / "run") == "first"
        (tmp_path / "lion.py").write_text("class Lion: rate = 2")
        go_on()
        assert _built(tmp_path / "run") == "second"
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert (line["event"], line["files"]) == ("code_changed", [f"{tmp_path}/lion.py", f"{tmp_path}/net.py"])


def _built(directory: Path) -> Any:
    return load_run(directory).load_task().build_model()
