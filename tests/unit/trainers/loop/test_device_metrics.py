"""Metric lines say how much of a device's peak a run uses, how much memory, and how busy the device is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.solo import SoloCollective
from orchestray.trainers.loop.device_metrics import DeviceMetrics, flops_of_training, metrics_of, peak_flops
from orchestray.trainers.loop.replica import Replica
from support.layouts import layout_settings, train_laid_out
from support.training import few_digits, stream_of


class Recorded:
    """A device that reports what it is given."""

    busy: float | None = 0.75

    def peak_memory_bytes(self) -> int:
        return 1000

    def utilization(self) -> float | None:
        return self.busy


def test_mfu_is_the_operations_of_the_batch_by_the_time_since_the_last_step_and_the_peak_of_all_workers() -> None:
    metrics = DeviceMetrics(None, flops_of_sample=6_000_000, peak=1e9, num_workers=2)
    assert metrics.of_step(100, done_s=5.0) == {}  # what came before it is not a step
    assert metrics.of_step(100, done_s=5.5) == {"mfu": 6e8 / 0.5 / 2e9}
    metrics.pause()
    assert metrics.of_step(100, done_s=9.0) == {}


def test_a_device_is_asked_how_busy_it_is_once_a_second_and_memory_is_in_every_line() -> None:
    now_s, device = [0.0], Recorded()
    metrics = DeviceMetrics(device, clock=lambda: now_s[0])
    lines = []
    for at_s in (0.0, 0.4, 1.0):
        now_s[0] = at_s
        lines.append(metrics.of_step(8, done_s=at_s))
    assert lines == [
        {"gpu_peak_memory_bytes": 1000, "gpu_utilization": 0.75},
        {"gpu_peak_memory_bytes": 1000},
        {"gpu_peak_memory_bytes": 1000, "gpu_utilization": 0.75},
    ]
    device.busy, now_s[0] = None, 5.0
    assert metrics.of_step(8, done_s=5.0) == {"gpu_peak_memory_bytes": 1000}


@pytest.mark.parametrize(
    ("name", "precision", "matmul", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", "highest", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", "highest", 756.0),
        ("NVIDIA A100-SXM4-40GB", "float32", "high", 156.0),
        ("NVIDIA A100-SXM4-40GB", "float32", "highest", 19.5),
        ("NVIDIA A100-SXM4-40GB", "float64", "highest", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", "highest", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", "highest", None),
    ],
)
def test_the_peak_of_a_known_device_is_that_of_the_run_s_precision(
    name: str, precision: str, matmul: str, tflops: float | None
) -> None:
    assert peak_flops(name, precision, matmul) == (None if tflops is None else tflops * 1e12)


def test_operations_of_training_are_three_times_those_of_the_products_of_a_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    assert flops_of_training(model, {"inputs": torch.zeros(1, 5)}) == 3 * 2 * (5 * 7 + 7 * 3)


class Counting(nn.Linear):
    """A layer that counts its calls, draws, and needs a value: the pass that counts operations runs for real."""

    def __init__(self) -> None:
        super().__init__(5, 7)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x * torch.rand(()).item())


def test_counting_operations_leaves_no_trace_in_the_model_or_the_generators() -> None:
    model, state = Counting(), torch.get_rng_state()
    assert flops_of_training(model, {"inputs": torch.zeros(1, 5)}) == 3 * 2 * 5 * 7
    assert float(model.num_calls) == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("network", [{}, {"data": 2}, {"tensor": 2}])
def test_mfu_of_a_run_is_by_the_stated_peak_and_all_workers(network: dict[str, Any]) -> None:
    settings = replace(layout_settings(network), peak_tflops=0.5)
    lines = train_laid_out(few_digits, settings).lines
    operations = 3 * 2 * (64 * 24 + 24 * 16 + 16 * 10) * settings.batch_size
    assert "mfu" not in lines[0]
    for before, line in pairwise(lines):
        possible = 0.5e12 * settings.layout.size * (line["time_s"] - before["time_s"])
        assert line["mfu"] == pytest.approx(operations / possible, rel=0.01)  # lines have times in microseconds


@pytest.mark.parametrize(("gpus", "share"), [(0.25, 0.25), (1, 1.0), (2, 1.0)])
def test_a_worker_on_a_gpu_has_the_peak_of_its_share_and_all_three_entries(
    monkeypatch: pytest.MonkeyPatch, gpus: float, share: float
) -> None:
    """Only asking the GPU is recorded here: the model is on the CPU."""
    asked = {"get_device_name": "NVIDIA H200", "max_memory_allocated": 77, "utilization": 50}
    for name, answer in asked.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    settings, task = replace(layout_settings(precision="bfloat16"), gpus=gpus), few_digits()
    replica = Replica(task, settings, stream_of(task, settings))
    replica.connect(SoloCollective())
    replica.device = torch.device("cuda", 0)
    metrics = metrics_of(replica)
    assert metrics is not None
    assert metrics.of_step(24, done_s=1.0) == {"gpu_peak_memory_bytes": 77, "gpu_utilization": 0.5}
    operations = 3 * 2 * (64 * 24 + 24 * 16 + 16 * 10) * 24
    mfu = metrics.of_step(24, done_s=3.0)["mfu"]
    assert mfu == pytest.approx(operations / 2.0 / (share * 989.4e12))


def test_lines_of_a_cpu_whose_peak_is_not_stated_say_nothing_of_it() -> None:
    lines = train_laid_out(few_digits, layout_settings()).lines
    assert not any("mfu" in line or "gpu_peak_memory_bytes" in line for line in lines)
