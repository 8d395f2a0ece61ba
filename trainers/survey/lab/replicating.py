"""Replicas of a model as threads of one process, and as processes: what Python's interpreter lock costs."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import seeded, threads, times_s

REPLICAS = 2
_WIDTH, _SAMPLES = 8, 64


class InPython(nn.Module):
    """A recurrent cell that goes through each sample by itself, in loops of Python: [samples, steps, width]."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.cell = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for sample in x:
            state = torch.zeros_like(sample[0])
            for step in range(self.steps):
                state = torch.tanh(self.cell(state) + sample[step])
            states.append(state)
        return torch.stack(states)


class InKernels(nn.Module):
    """Two wide layers, whose time goes into torch's own loops: [samples, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@dataclass(frozen=True)
class Share:
    """A part of a batch, whose gradient a thread or a process computes: it can be pickled.

    Args:
        kind: class of the model.
        size: its argument.
        shape: shape of the batch.
        index: number of the part.
        parts: number of parts.
    """

    kind: Callable[[int], nn.Module]
    size: int
    shape: tuple[int, ...]
    index: int = 0
    parts: int = 1

    def __call__(self) -> tuple[np.ndarray, int]:
        """Return the gradient as one vector, and the process that computed it, once all parts have begun.

        Tensors of a process would need files.
        """
        if self.parts > 1:
            _meeting.wait()
        model, x = _model(self.kind, self.size), _batch(self.shape).chunk(self.parts)[self.index]
        gradients = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        return torch.cat([each.flatten() for each in gradients]).numpy(), os.getpid()


@cache
def _model(kind: Callable[[int], nn.Module], size: int) -> nn.Module:
    torch.manual_seed(0)
    return kind(size)


@cache
def _batch(shape: tuple[int, ...]) -> Tensor:
    return seeded(*shape)


_meeting: Any = None
"""A barrier at which the parts of a batch wait for each other, so that no worker takes two of them."""


def _join(meeting: Any) -> None:
    global _meeting  # noqa: PLW0603 - an executor's initialiser can leave it nowhere else
    _meeting = meeting
    torch.set_num_threads(1)


def interpreter_lock(rounds: int = 7, steps: int = 12, width: int = 768) -> Exhibit:
    """Compare the gradient of a batch by one replica, by replicas in threads, and by replicas in processes."""
    models = {
        "a loop in Python": Share(InPython, steps, (_SAMPLES, steps, _WIDTH)),
        "wide layers": Share(InKernels, width, (8 * _SAMPLES, width)),
    }
    context = multiprocessing.get_context("spawn")
    rows: list[list[Any]] = []
    with (
        threads(1),
        ThreadPoolExecutor(REPLICAS, initializer=_join, initargs=(threading.Barrier(REPLICAS),)) as in_threads,
        ProcessPoolExecutor(REPLICAS, context, _join, (context.Barrier(REPLICAS),)) as in_processes,
    ):
        for model, whole in models.items():
            ways: dict[str, Callable[[], tuple[Tensor, int]]] = {
                "one": partial(_gradient, whole, None),
                f"{REPLICAS} threads": partial(_gradient, whole, in_threads),
                f"{REPLICAS} processes": partial(_gradient, whole, in_processes),
            }
            found = {name: way() for name, way in ways.items()}
            exact, _ = found["one"]
            apart = {name: float((each - exact).abs().max() / exact.abs().max()) for name, (each, _) in found.items()}
            times = {name: median(taken) for name, taken in times_s(ways, rounds).items()}
            rows += [
                [model, name, found[name][1], times[name] * 1e3, times["one"] / times[name], apart[name]]
                for name in ways
            ]
    findings = [f"{row[0]}, {row[1]}: {row[4]:.2g} times as fast as one replica." for row in rows if row[1] != "one"]
    findings.append("A thread of Python waits while another runs Python; in torch's own loops it does not.")
    columns = ["model", "replicas", "processes", "ms a batch", "times as fast", "difference of the gradients"]
    return Exhibit("interpreter-lock", "Replicas as threads and as processes", columns, rows, findings)


def _gradient(whole: Share, pool: Executor | None) -> tuple[Tensor, int]:
    """Return the gradient of the whole batch, the sum of its parts', and the number of processes that computed it."""
    if pool is None:
        return torch.from_numpy(whole()[0]), 1
    submitted = [pool.submit(replace(whole, index=index, parts=REPLICAS)) for index in range(REPLICAS)]
    parts = [part.result() for part in submitted]
    return torch.stack([torch.from_numpy(part) for part, _ in parts]).sum(0), len({process for _, process in parts})
