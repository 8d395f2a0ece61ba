"""A small network for a device with little memory, in float32 and in 8-bit integers: bytes, latency and accuracy."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn

from orchestray.serving.models.quantize import num_bytes, quantize_int8
from orchestray.trainers.survey.lab.timing import threads, times_s
from orchestray.trainers.tasks.digits import Digits

_HIDDEN, _STEPS, _RATE = (128, 128), 60, 0.01


@dataclass(frozen=True)
class Measured:
    """A network as a device has it.

    Args:
        numbers: type of its weights.
        num_bytes: size of its parameters and buffers.
        latency_s: median seconds of one sample on one thread of the CPU.
        accuracy: part of the validation samples that it classifies rightly.
    """

    numbers: str
    num_bytes: int
    latency_s: float
    accuracy: float


def measure_small_net(rounds: int = 50) -> list[Measured]:
    """Train a classifier of digits in float32, quantize it, and measure both.

    Args:
        rounds: rounds of the timings, which the two take in turns.
    """
    with threads(1):
        task, small = _trained()
        networks = {"float32": small, "int8": quantize_int8(copy.deepcopy(small))}
        batch = task.to_batch(task.dataset("validation"))
        with torch.inference_mode():
            one = batch["inputs"][:1]
            taken = times_s({name: partial(network, one) for name, network in networks.items()}, rounds)
            return [
                Measured(
                    name,
                    num_bytes(network),
                    median(taken[name]),
                    float(task.metrics(network(batch["inputs"]), batch)["accuracy"]),
                )
                for name, network in networks.items()
            ]


def _trained() -> tuple[Digits, nn.Module]:
    torch.manual_seed(0)
    task = Digits(hidden=[*_HIDDEN])
    model, batch = task.build_model(), task.to_batch(task.dataset("train"))
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        task.loss(model(batch["inputs"]), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return task, model.eval()
