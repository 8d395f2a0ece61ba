"""The engine `ray_train`: the backend of the group that Ray Train makes before its workers know where they are."""

from __future__ import annotations

import pytest

from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.driver.engines import ray_train
from support.search_loop import base


@pytest.mark.parametrize(
    ("gpus", "alone", "together"),
    [
        (0, "gloo", "gloo"),
        (0.25, "gloo", "over_host"),
        (0.5, "gloo", "over_host"),
        (1, "gloo", "nccl"),
        (2, "gloo", "nccl"),
    ],
)
def test_the_backend_follows_from_the_gpus_of_a_worker_and_the_number_of_workers(
    gpus: float, alone: str, together: str
) -> None:
    def chosen(data: int) -> str:
        changes = {"engine": "ray_train", "resources": {"gpus_per_worker": gpus}}
        return ray_train._backend(load_train_config(base() | changes | {"strategy": {"network": {"data": data}}}))

    assert (chosen(1), chosen(2)) == (alone, together)
