"""The process of a worker under parameter servers: what it tells of itself."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from orchestray.trainers.loop import task_host
from orchestray.trainers.ps.hosts.worker_host import WorkerHost
from support.central_run import central_settings
from support.training import few_digits


@pytest.mark.parametrize(("device", "is_there"), [("cpu", False), ("cuda:1", True)])
def test_the_peak_of_a_workers_memory_is_that_of_its_own_device(
    monkeypatch: pytest.MonkeyPatch, device: str, *, is_there: bool
) -> None:
    there = 2**50  # more than any process of a CPU has
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {torch.device("cuda", 1): there}.__getitem__)
    with mock.patch.object(task_host.tasks, "build", side_effect=lambda _: few_digits()):
        host = WorkerHost(central_settings(2))
    host._device = torch.device(device)
    assert (host.usage()["memory"] == there) is is_there
