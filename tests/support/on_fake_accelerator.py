"""A child process of the tests that trains and serves on a device that is not the CPU; see `fake_accelerator`.

It prints a JSON object: by layout whether the run is that of the CPU bit for bit, and the places where a step waits.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from orchestray.platform.comm import collective
from orchestray.platform.comm.over_host import OverHost
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.run.checkpoint import CheckpointWriter, list_checkpoints
from orchestray.serving.models.served import ServedModel
from orchestray.trainers.core.unread import Arriving
from orchestray.trainers.loop import task_host
from orchestray.trainers.loop.loop import Loop
from orchestray.trainers.ps.protocol.assignments import Compute
from orchestray.trainers.ps.worker.worker import CentralWorker
from support.central_run import central_settings, train_central
from support.device_layouts import ALL, GROUPS, IN_FLOAT32, SERVERS
from support.fake_accelerator import register
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.recorded_device import RecordedDevice
from support.synchronizing import Synchronizing
from support.tiny_task import TinyTask
from support.training import furthest, order_of, same_bits

Waits = list[tuple[str, str, str]]

NAN_AT = 0
"""A sample of the second batch."""
_SHOWN = ("step", "epoch", "loss", "grad_norm", "split")


class Misplaced(TinyTask):
    """A task whose loss takes a tensor that it makes on the CPU, wherever the model is."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(outputs * torch.ones(2), batch)


def trained(device: torch.device | str, name: str, task: Callable[[], Any] = TinyTask) -> LaidOut:
    chosen = {"steps": 3, "precision": "float32", "task": task, **ALL[name]}
    return train_laid_out(chosen.pop("task"), layout_settings(**chosen), device=device)


@contextlib.contextmanager
def watched() -> Iterator[Waits]:
    """Yield the waits of all steps but the first of each worker, which looks at the loss and the model."""
    until_agreed, init, read = Loop._until_agreed, Arriving.__init__, Arriving.read
    compute = CentralWorker._compute
    waits: Waits = []
    local = threading.local()

    def noting_step(loop: Loop, *rest: Any) -> Any:
        # Workers are threads, and torch has one thread a device for backward passes: they would wait for each other.
        with torch.autograd.set_multithreading_enabled(False), Synchronizing() as local.mode:
            result = until_agreed(loop, *rest)
        waits.extend(local.mode.found if loop._replica.position.step > 1 else ())
        return result

    def noting_share(worker: CentralWorker, order: Compute, *rest: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False), Synchronizing() as mode:
            result = compute(worker, order, *rest)
        waits.extend(mode.found if order.step > 1 else ())
        return result

    def noting_init(arriving: Any, values: Any) -> None:
        init(arriving, values)
        arriving.mode = getattr(local, "mode", None)

    def noting_read(arriving: Any) -> list[float]:
        if arriving.mode is not None and arriving.mode is local.mode:
            local.mode.found.append(("trainers/core/unread.py", "Arriving.read", "read in the step that made it"))
        return read(arriving)

    with (
        mock.patch.object(Loop, "_until_agreed", noting_step),
        mock.patch.object(CentralWorker, "_compute", noting_share),
        mock.patch.object(Arriving, "__init__", noting_init),
        mock.patch.object(Arriving, "read", noting_read),
    ):
        yield waits


def compared(device: torch.device, name: str, weights: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Return what a layout's run on the device has in common with that on the CPU, and where it waits.

    Args:
        device: the device.
        name: name of the layout.
        weights: weights on the device of the layouts before, to which those of this one are added.
    """
    on_cpu = trained("cpu", name)
    with watched() as waits:
        there = trained(device, name)
    weights[name] = {key: each.cpu() for key, each in there.weights.items()}
    shown = [[{key: line.get(key) for key in _SHOWN} for line in run.lines] for run in (on_cpu, there)]
    return {
        "weights are equal": same_bits(on_cpu.weights, weights[name]),
        "lines are equal": shown[0] == shown[1],
        "result is equal": on_cpu.outcome.final == there.outcome.final,
        "waits": sorted({*waits}),
        "furthest": furthest(on_cpu.weights, weights[name]),
    }


def under_servers(device: torch.device, exchange: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return what a run under parameter servers with workers on the device has in common with that on the CPU."""
    settings = central_settings(2, {"shards": 2, **(exchange or {})}, **more, steps=3, precision="float32")
    with tempfile.TemporaryDirectory() as folder:
        on_cpu = train_central(TinyTask, settings, Path(folder) / "cpu")
        with mock.patch.object(task_host, "device_of", return_value=device), watched() as waits:
            there = train_central(TinyTask, settings, Path(folder) / "device")
    return {
        "weights are equal": same_bits(on_cpu.weights, there.weights),
        "losses are equal": on_cpu.losses == there.losses,
        "waits": sorted({*waits}),
    }


def failure(device: torch.device | str, name: str, task: Callable[[], Any]) -> str:
    """Return the error of a run that fails."""
    try:
        trained(device, name, task)
    except OrchestrayError as error:
        return str(error)
    return ""


def _nan_in_a_long_epoch() -> TinyTask:
    """Return a task of which the loss of step 2 is not finite; all its steps are of one epoch."""
    return TinyTask(num_samples=100, nan_at=int(order_of(100, seed=0, epoch=0)[30]))


def saved(device: torch.device | str) -> list[int]:
    """Return the steps of which there are checkpoints, one a step, after a run that fails by the loss of step 2."""
    settings = replace(layout_settings(steps=5, precision="float32"), checkpoint_every_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(OrchestrayError):
            train_laid_out(
                _nan_in_a_long_epoch,
                settings,
                device=device,
                checkpoints=lambda: CheckpointWriter(folder, keep=10),
            )
        return [found.step for found in list_checkpoints(folder)]


class ServingDevice(RecordedDevice):
    """The device as an endpoint uses it: its own memory, and copies that the CPU does not wait for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, into: Tensor, source: Tensor) -> None:
        self._current[-1].copies.append(lambda: into.copy_(source, non_blocking=True))


def served(device: torch.device) -> dict[str, Any]:
    """Return whether a served model answers on the device as on the CPU, and where a batch waits."""
    place = ServingDevice(device)
    on_cpu = ServedModel(_model(), torch.zeros(4))
    there = ServedModel(_model(), torch.zeros(4), device=device, accelerator=place)
    samples = [on_cpu.signature.parse([float(row)] * 4) for row in range(3)]
    place.log.clear()
    with Synchronizing() as mode:
        answers = there.run(samples)
    pairs = [(one[key], other[key]) for one, other in zip(on_cpu.run(samples), answers, strict=True) for key in one]
    return {
        "answers are equal": all(bool((one == other).all()) for one, other in pairs),
        "waits": [*mode.found, *(line for line in place.log if line.startswith("CPU"))],
    }


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def main(library: str, group: str) -> dict[str, Any]:
    torch.set_num_threads(1)  # workers are threads already, and their tensors are small
    device = register(Path(library))
    connect = collective.connect

    def connect_over_host(*args: Any, **more: Any) -> OverHost:
        return OverHost(connect(*args, **more), lambda tensor: tensor.device == device)

    with mock.patch.object(collective, "connect", connect_over_host):
        weights: dict[str, dict[str, Tensor]] = {}
        layouts = {name: compared(device, name, weights) for name in GROUPS[group]}
        if group == "exchanges":
            return {"layouts": layouts, "servers": {name: under_servers(device, **SERVERS[name]) for name in SERVERS}}
        return {
            "layouts": layouts,
            "rounded": {short: furthest(weights[short], weights[long]) for short, long in IN_FLOAT32.items()},
            "misplaced": failure(device, "one", Misplaced),
            "nan": {
                name: [failure(place, name, lambda: TinyTask(nan_at=NAN_AT)) for place in ("cpu", device)]
                for name in ("one", "data")
            },
            "nan long ago": [failure(place, "averaging", _nan_in_a_long_epoch) for place in ("cpu", device)],
            "saved": [saved("cpu"), saved(device)],
            "served": served(device),
        }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
