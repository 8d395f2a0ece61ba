"""A worker and its server are measured up to the end of their run, and with all that a share sends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from orchestray.trainers import tasks
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.planning import served


def test_the_checkpoint_at_a_runs_end_and_the_buffers_of_a_share_are_within_what_is_measured(tmp_path: Path) -> None:
    config = load_train_config(
        {
            "task": {"type": "digits", "model": "cnn", "hidden": [4, 8]},
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
    model = tasks.build(settings.task).build_model()
    parameters, buffers = ([tensor.numel() for tensor in kind] for kind in (model.parameters(), model.buffers()))
    assert server.result()["bytes"] == 2 * (4 * sum(parameters) + 8 * sum(buffers))  # these are sent as float64, int64
    assert [*(tmp_path / "checkpoints").iterdir()]


def test_where_pushes_and_fetches_are_rare_a_share_has_its_part_of_them() -> None:
    assert served.bytes_a_share([0, 30, 60, 90], 1, 1) == 30
    assert served.bytes_a_share([0, 10, 40, 50, 80], 1, 2) == 20  # a fetch of 20 with every second push of 10
    assert served.bytes_a_share([0, 50, 100], 4, 2) == 12.5  # two fetches and a push in four shares
    assert served.bytes_a_share([7], 1, 1) == 0
