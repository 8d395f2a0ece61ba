"""Entries of metric lines about the device: the part of its peak that is used (MFU), its memory, and how busy it is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

from orchestray.platform.data.nested import map_tensors
from orchestray.platform.process.gpu import Gpu
from orchestray.trainers.analysis.flops import flops
from orchestray.trainers.core.buffers import untouched
from orchestray.trainers.core.inputs import arguments, inputs_of
from orchestray.trainers.core.modes import evaluating
from orchestray.trainers.core.rng import generators_put_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from orchestray.platform.task import Batch
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.loop.replica import Replica

_PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H100 PCIe", {"bfloat16": 756.0, "tf32": 378.0, "float32": 51.0}),
    ("H100 NVL", {"bfloat16": 835.5, "tf32": 417.5, "float32": 60.0}),
    ("H200 NVL", {"bfloat16": 835.5, "tf32": 417.5, "float32": 60.0}),
    ("H100", {"bfloat16": 989.4, "tf32": 494.7, "float32": 66.9}),
    ("H200", {"bfloat16": 989.4, "tf32": 494.7, "float32": 66.9}),
    ("A100", {"bfloat16": 312.0, "tf32": 156.0, "float32": 19.5}),
    ("L40S", {"bfloat16": 362.05, "tf32": 183.0, "float32": 91.6}),
)
"""Peaks by a part of the device's name, dense, of NVIDIA's data sheets; the first that fits holds."""
_FORWARD_AND_BACKWARD = 3
"""Operations of a pass both ways, in those of the forward pass: a product's gradients are two products of its size."""
_LOOK_EVERY_S = 1.0
"""Seconds between two looks at how busy the device is, which are a call to its driver."""


class MeasuredDevice(Protocol):
    """A device that says what it does (`platform.process.gpu.Gpu`)."""

    def peak_memory_bytes(self) -> int:
        """Return the peak of this process's allocations, in bytes."""

    def utilization(self) -> float | None:
        """Return the part of the last moments in which it computed, 0 to 1; None if unknown."""


def peak_flops(name: str, precision: str, matmul_precision: str) -> float | None:
    """Return the peak of a device in operations per second; None if it is not known, as that of a part (MIG).

    Args:
        name: name of the device.
        precision: `train.precision`.
        matmul_precision: `train.float32_matmul_precision`.
    """
    kind = "tf32" if precision == "float32" and matmul_precision != "highest" else precision
    peaks = next((peaks for part, peaks in _PEAK_TFLOPS if part in name), {})
    return None if kind not in peaks or "MIG" in name else peaks[kind] * 1e12


def flops_of_training(model: nn.Module, sample: Batch) -> int:
    """Return the operations of a forward and a backward pass of one sample; those of recomputing do not count.

    The model's buffers and all generators are as before.

    Args:
        model: the whole model.
        sample: a batch of one sample.

    Raises:
        Exception: whatever the model raises if it cannot be called in evaluation mode.
    """
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    args, kwargs = map_tensors(
        lambda one: one.to(device, dtype if one.is_floating_point() else None), arguments(inputs_of(sample))
    )
    with evaluating(model), untouched(model), generators_put_back():
        return _FORWARD_AND_BACKWARD * flops(model, *args, **kwargs).counted


class DeviceMetrics:
    """Entries of a worker's metric lines about its device; those that are not known are left out."""

    def __init__(
        self,
        device: MeasuredDevice | None,
        *,
        flops_of_sample: int = 0,
        peak: float | None = None,
        num_workers: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            device: the device; None for a CPU.
            flops_of_sample: operations of both passes of one sample.
            peak: peak of a worker's device, or of its share of one, in operations per second; None: not known.
            num_workers: workers that compute the batch.
            clock: clock in seconds.
        """
        self._device, self._clock = device, clock
        self._flops_of_sample = flops_of_sample
        self._peak = None if peak is None else peak * num_workers
        self._looked_s = -_LOOK_EVERY_S
        self._before_s: float | None = None

    def pause(self) -> None:
        """Note that the next step does not follow the last one at once."""
        self._before_s = None

    def of_step(self, batch_samples: int, done_s: float) -> dict[str, float]:
        """Return the entries of a step.

        Args:
            batch_samples: samples of its batch, over all replicas.
            done_s: time at which it was done, in seconds. Steps follow each other: the time since the last one counts,
                as a GPU may not have begun when the CPU is done.
        """
        entries: dict[str, float] = {}
        before_s, self._before_s = self._before_s, done_s
        if self._peak is not None and self._flops_of_sample and before_s is not None and done_s > before_s:
            entries["mfu"] = self._flops_of_sample * batch_samples / (done_s - before_s) / self._peak
        if self._device is not None:
            entries["gpu_peak_memory_bytes"] = self._device.peak_memory_bytes()
            if (now_s := self._clock()) - self._looked_s >= _LOOK_EVERY_S:
                self._looked_s = now_s
                if (busy := self._device.utilization()) is not None:
                    entries["gpu_utilization"] = busy
        return entries


def metrics_of(replica: Replica) -> DeviceMetrics | None:
    """Return the entries of a connected replica's lines about its device; None if there are none."""
    settings = replica.settings
    gpu = Gpu(replica.device) if replica.device.type == "cuda" else None
    peak = _peak_of(settings, gpu)
    if gpu is None and peak is None:
        return None
    operations = 0
    if peak is not None:
        try:
            operations = flops_of_training(_whole_model(replica), replica.stream("train").one_sample())
        except Exception as error:  # noqa: BLE001 - the model's own code, called as it is called nowhere else
            replica.warn(f"mfu is left out of the metrics: the model's operations could not be counted ({error})")
    return DeviceMetrics(gpu, flops_of_sample=operations, peak=peak, num_workers=replica.world.size)


def _peak_of(settings: ReplicaSettings, gpu: Gpu | None) -> float | None:
    if settings.peak_tflops is not None:
        return settings.peak_tflops * 1e12
    if gpu is None:
        return None
    peak = peak_flops(gpu.name, settings.precision, settings.arithmetic.float32_matmul_precision)
    return None if peak is None else peak * min(1.0, settings.gpus)  # of several it computes on one


def _whole_model(replica: Replica) -> nn.Module:
    """Return the whole model to count its operations, without memory for weights if this worker holds a part."""
    if replica.settings.is_replicated:
        return replica.model
    with generators_put_back(), torch.device("meta"):
        return replica.task.build_model()
