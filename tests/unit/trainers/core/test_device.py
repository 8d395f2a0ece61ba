"""Choice of the device on which a process computes."""

from __future__ import annotations

import pytest
import torch

from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.device import device_of
from support.search_loop import base


@pytest.mark.parametrize(("gpus", "is_there"), [(0, False), (0, True), (1, False), (1, True)])
def test_a_process_computes_on_a_gpu_where_the_config_gives_it_one_and_there_is_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, is_there: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    config = load_train_config(base() | {"resources": {"gpus_per_worker": gpus}})
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    assert device_of(settings) == torch.device("cuda:3" if gpus and is_there else "cpu")
