"""Training by map and reduce: gradients of parts of a batch are map tasks of Ray, and their sum is reduced."""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from orchestray.platform.cluster.cluster import connect, current
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import seeded

_LR = 0.1
_SAMPLES, _WIDTH, _CLASSES = 96, 32, 10
_RETRIES = 3


def make_model() -> nn.Module:
    """Return the model of the experiment, the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(_WIDTH, 64), nn.Tanh(), nn.Linear(64, _CLASSES)).double()


def gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the sum of the gradients of some samples.

    Args:
        weights: all weights as one vector.
        x: inputs, [samples, width].
        y: classes, [samples].
    """
    model = make_model()
    parameters = list(model.parameters())
    nn.utils.vector_to_parameters(torch.tensor(weights), parameters)
    loss = functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y), reduction="sum")
    flat: torch.Tensor = torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])
    return flat.numpy()


def map_gradient(
    weights: np.ndarray, x: np.ndarray, y: np.ndarray, executions: Path, is_to_be_killed: bool
) -> np.ndarray:
    """Return `gradient`: a map task, which leaves a file for each time that it is executed.

    Args:
        weights, x, y: as those of `gradient`.
        executions: folder of the files.
        is_to_be_killed: True to kill its process the first time.
    """
    is_first = not any(executions.iterdir())
    (executions / uuid.uuid4().hex).touch()
    if is_to_be_killed and is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    return gradient(weights, x, y)


def add(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the sum of two gradients: a reduce task."""
    both: np.ndarray = left + right
    return both


def map_reduce(rounds: int = 0, maps: int = 4, steps: int = 6, killed: tuple[int, int] = (2, 1)) -> Exhibit:
    """Train by tasks of Ray, one of which is killed, beside a single process.

    Args:
        rounds: unused: nothing is timed.
        maps: map tasks of a step.
        steps: steps.
        killed: step and map task whose process is killed in the middle, both from 0.
    """
    del rounds
    is_there = current() is not None
    cluster = connect()
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = _train(maps, steps, killed, Path(folder))
    finally:
        if not is_there:
            cluster.close()
    again = sum(row[3] - row[1] for row in rows)
    findings = [
        f"The process of one of {maps * steps} map tasks was killed; Ray executed {again} of them again.",
        f"The weights after {steps} steps differ from those of one process by {rows[-1][-1]:.1g} at most.",
    ]
    columns = ["step", "map tasks", "reduce tasks", "executions of map tasks", "difference of the weights"]
    return Exhibit("map-reduce", "Training by map and reduce tasks of Ray", columns, rows, findings)


def _train(maps: int, steps: int, killed: tuple[int, int], folder: Path) -> list[list[Any]]:
    import ray  # late: an experiment without it takes a second less to start

    map_task = ray.remote(num_cpus=0, max_retries=_RETRIES)(map_gradient)
    reduce_task = ray.remote(num_cpus=0, max_retries=_RETRIES)(add)
    x = seeded(_SAMPLES, _WIDTH).double().numpy()
    y = np.arange(_SAMPLES) % _CLASSES
    parts = list(zip(np.array_split(x, maps), np.array_split(y, maps), strict=True))
    weights = alone = nn.utils.parameters_to_vector(make_model().parameters()).detach().numpy()
    rows: list[list[Any]] = []
    for step in range(steps):
        held = ray.put(weights)
        places = [folder / f"{step}-{index}" for index in range(maps)]
        for place in places:
            place.mkdir()
        sums: Sequence[Any] = [
            map_task.remote(held, *part, place, (step, index) == killed)
            for index, (part, place) in enumerate(zip(parts, places, strict=True))
        ]
        num_reduces = 0
        while len(sums) > 1:
            pairs = zip(sums[::2], sums[1::2], strict=False)
            odd = sums[len(sums) // 2 * 2 :]
            sums = [*(reduce_task.remote(*pair) for pair in pairs), *odd]
            num_reduces += len(sums) - len(odd)
        weights = weights - _LR / _SAMPLES * ray.get(sums[0])
        alone = alone - _LR / _SAMPLES * gradient(alone, x, y)
        executions = sum(len(list(place.iterdir())) for place in places)
        rows.append([step + 1, maps, num_reduces, executions, float(np.abs(weights - alone).max())])
    return rows
