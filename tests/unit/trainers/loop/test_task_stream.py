"""The stream of a run: data without end have no epoch, which an average of equal weights needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestray.platform.data.endless import Endless
from orchestray.platform.data.source import open_split
from orchestray.platform.errors import ConfigError
from orchestray.trainers.loop.task_stream import task_stream
from support.layouts import layout_settings
from support.tiny_task import TinyTask


class EndlessTask(TinyTask):
    def dataset(self, split: str) -> Any:
        return Endless(lambda _: [super(EndlessTask, self).dataset(split)])


def test_an_average_of_equal_weights_is_refused_for_data_without_end() -> None:
    task: Any = EndlessTask()
    source = open_split(task, "train", num_endless=24)
    for average in (None, {"type": "ema"}):
        settings = layout_settings({"microbatches": None}, steps=3, batch_size=8, average=average)
        assert task_stream(task, source, "train", settings).steps_per_epoch == 3
    settings = layout_settings({"microbatches": None}, steps=3, batch_size=8, average={"type": "swa"})
    with pytest.raises(ConfigError, match="these are Endless; use ema"):
        task_stream(task, source, "train", settings)


def test_batches_for_a_gpu_are_pinned_and_no_others() -> None:
    task: Any = TinyTask()
    source, settings = open_split(task, "train"), layout_settings()
    pins = [
        task_stream(task, source, "train", settings, device=device)._pin
        for device in (None, torch.device("cpu"), torch.device("cuda:0"))
    ]
    assert pins == [None, None, torch.Tensor.pin_memory]
