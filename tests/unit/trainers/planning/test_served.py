"""A worker and its server are measured up to the end of their run, where they keep a checkpoint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.planning import served


def test_the_checkpoint_at_a_runs_end_is_within_what_is_measured(tmp_path: Path) -> None:
    config = load_train_config(
        {
            "task": {"type": "digits", "hidden": [8]},
            "strategy": {"network": {"data": 2}, "exchange": {"type": "parameter_server"}},
            "train": {"batch_size": 64, "steps": 5, "optimizer": {"type": "sgd", "lr": 0.1}},
        }
    )
    settings = served.of_one_worker(ReplicaSettings.from_config(config, storage="", model_directory=""), tmp_path)
    barrier, meeting = Barrier(2), tmp_path / "meeting"

    def start() -> None:
        barrier.wait(60)

    with ThreadPoolExecutor(2) as both:
        server = both.submit(served.serve, settings, 0, meeting, start)
        worker = both.submit(served.work, settings, meeting, start)
        assert worker.result(60)["shares"] == server.result(60)["num_pushes"] > 0
    assert [*(tmp_path / "checkpoints").iterdir()]
