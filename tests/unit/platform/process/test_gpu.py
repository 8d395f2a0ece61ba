"""A GPU as it is measured: by its index, in parts and seconds, and never at the cost of the run. No GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestray.platform.process.gpu import Gpu

DEVICE = torch.device("cuda", 1)


class NoSuchNumberError(Exception):
    """An error of NVML's own, of no class that is there without it."""


@pytest.mark.parametrize("error", [ModuleNotFoundError, RuntimeError, NoSuchNumberError])
def test_what_nvml_does_not_say_is_unknown_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(_: object) -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    assert Gpu(DEVICE).utilization() is None


def test_each_question_names_the_gpu_and_percent_become_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"get_device_name": "a GPU", "max_memory_allocated": 2**33, "utilization": 25}
    for name, answer in asked.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer if device == DEVICE else None)
    gpu = Gpu(DEVICE)
    assert (gpu.name, gpu.peak_memory_bytes(), gpu.utilization()) == ("a GPU", 2**33, 0.25)


class Event:
    """An event of a GPU's clock, which counts in milliseconds."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms, self.is_passed, self.stream = 0.0, False, ""

    def record(self, stream: str) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.is_passed

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def test_the_time_between_two_marks_is_in_seconds_once_the_stream_has_passed_the_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    gpu = Gpu(DEVICE)
    first, second = gpu.mark(), gpu.mark()
    assert first.stream == second.stream == "stream of cuda:1"
    second.at_ms = 250.0
    assert gpu.seconds_between(first, second) is None
    second.is_passed = True
    assert gpu.seconds_between(first, second) == 0.25
