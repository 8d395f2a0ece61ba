"""Choice of the device on which a process computes."""

from __future__ import annotations

import pytest
import torch

from orchestray.platform.errors import ClusterError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.device import device_of
from support.search_loop import base


def settings_with(gpus: float) -> ReplicaSettings:
    config = load_train_config(base() | {"resources": {"gpus_per_worker": gpus}})
    return ReplicaSettings.from_config(config, storage="", model_directory="")


@pytest.mark.parametrize("found", [0, 1, 8])
def test_a_process_without_a_gpu_of_its_own_computes_on_the_cpu_whatever_it_sees(
    monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    assert device_of(settings_with(0)) == torch.device("cpu")


@pytest.mark.parametrize("gpus", [0.5, 1, 2])
def test_a_process_with_a_gpu_computes_on_it_by_its_index_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, gpus: float
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of(settings_with(gpus)) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ClusterError, match="finds none on its machine"):
        device_of(settings_with(gpus))
