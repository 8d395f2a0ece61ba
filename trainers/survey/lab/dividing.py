"""Inference by devices of unlike speed: two actors of Ray, each with a part of every batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from functools import cache, partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from torch import nn

from orchestray.platform.cluster.cluster import connect, current
from orchestray.trainers.survey.lab.divided_batches import Device, DeviceLostError, DividedBatches, Finish
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import seeded, times_s

_WIDTH, _CLASSES = 32, 10
_SLOWER = 8
"""Factor by which the first device becomes slower."""


@cache
def make_model() -> nn.Module:
    """Return the model of the experiment, the same in each process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(_WIDTH, 64), nn.GELU(), nn.Linear(64, _CLASSES)).double().eval()


def answers(x: np.ndarray) -> np.ndarray:
    """Return the model's outputs, [samples, classes], for inputs, [samples, width]."""
    with torch.inference_mode():
        outputs: np.ndarray = make_model()(torch.tensor(x)).numpy()
    return outputs


class Host:
    """An actor's side of a device.

    Args:
        rate: samples that it answers in a second; it waits for the rest of their time.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        torch.set_num_threads(1)

    def set_rate(self, rate: float) -> None:
        """Answer as many samples in a second from now on."""
        self._rate = rate

    def answer(self, x: np.ndarray, is_to_be_killed: bool) -> tuple[np.ndarray, float]:
        """Return `answers` and the seconds that they took.

        Args:
            x: inputs, [samples, width].
            is_to_be_killed: True to kill the process before it answers.
        """
        began_s = perf_counter()
        outputs = answers(x)
        if is_to_be_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        sleep(max(0.0, len(x) / self._rate - (perf_counter() - began_s)))
        return outputs, perf_counter() - began_s


class ActorDevice(Device):
    """A device that is an actor of Ray.

    Args:
        rate: samples that it answers in a second.
    """

    def __init__(self, rate: float) -> None:
        import ray  # late: an experiment without it takes a second less to start

        self._ray = ray
        self._host: Any = ray.remote(num_cpus=0)(Host).remote(rate)
        self.is_to_be_killed = False
        """True to have its process killed by what it is given next."""

    def set_rate(self, rate: float) -> None:
        """Have it answer as many samples in a second from now on."""
        self._ray.get(self._host.set_rate.remote(rate))

    def start(self, x: np.ndarray) -> Finish:
        return partial(self._finish, self._host.answer.remote(x, self.is_to_be_killed))

    def _finish(self, reference: Any) -> tuple[np.ndarray, float]:
        try:
            answered: tuple[np.ndarray, float] = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            raise DeviceLostError(str(error)) from error
        return answered


def unlike_devices(
    rounds: int = 7, rates: tuple[float, float] = (4000.0, 1000.0), samples: int = 200, batches: int = 6
) -> Exhibit:
    """Answer batches by two devices with parts by speed, and beside it with equal parts and on each device alone.

    Then the first device becomes slow, and at last its process is killed with a part of a batch.

    Args:
        rounds: batches of each way that are timed.
        rates: samples per second of the two devices.
        samples: samples of a batch.
        batches: batches after the change of a speed.
    """
    is_there = current() is not None
    cluster = connect()
    try:
        rows = _measured(rounds, rates, samples, batches)
    finally:
        if not is_there:
            cluster.close()
    columns = ["batch", "samples of the first device", "samples of the second", "ms", "largest difference"]
    title = "One batch divided over two devices of unlike speed"
    return Exhibit("unlike-devices", title, columns, rows, _findings(rows, rates, samples))


def _findings(rows: list[list[Any]], rates: tuple[float, float], samples: int) -> list[str]:
    alone, _, halves, by_speed, *changed, killed = rows
    slowed = rates[0] / _SLOWER
    right = samples * slowed / (slowed + rates[1])
    after = [number for number, row in enumerate(changed) if abs(row[1] - right) <= samples / 10]
    settled = f"are right within a tenth of the batch after {after[0]} batches" if after else "do not become right"
    return [
        f"By speed a batch takes {by_speed[3] / halves[3]:.2g} of the time of equal halves.",
        f"That is {by_speed[3] / alone[3]:.2g} of the time of the first device alone.",
        f"The first device, {rates[0] / rates[1]:.3g} times as fast, answers {by_speed[1]} of {samples} samples.",
        f"When it becomes {_SLOWER} times slower, parts {settled}.",
        f"Its process was killed with a part of a batch; the second answered {killed[2]} of {samples} samples.",
        f"Outputs, in order, differ from those of one process by {max(row[4] for row in rows):.1g} at most.",
    ]


def _measured(rounds: int, rates: tuple[float, float], samples: int, batches: int) -> list[list[Any]]:
    x = seeded(samples, _WIDTH).double().numpy()
    exact = answers(x)
    first, second = (ActorDevice(rate) for rate in rates)
    by_speed = DividedBatches([first, second])
    ways: Mapping[str, tuple[DividedBatches, tuple[int, ...]]] = {
        "first device alone": (DividedBatches([first]), (0,)),
        "second device alone": (DividedBatches([second]), (1,)),
        "equal halves": (DividedBatches([first, second], is_by_speed=False), (0, 1)),
        "by speed": (by_speed, (0, 1)),
    }

    def row(name: str, way: DividedBatches, numbers: tuple[int, ...], took_ms: float, outputs: np.ndarray) -> list[Any]:
        answered = {numbers[device]: count for device, count in way.answered.items()}
        return [name, answered.get(0, 0), answered.get(1, 0), took_ms, float(np.abs(outputs - exact).max())]

    taken = times_s({name: partial(way.answer, x) for name, (way, _) in ways.items()}, rounds)
    rows = [row(name, way, numbers, median(taken[name]) * 1e3, way.answer(x)) for name, (way, numbers) in ways.items()]

    def timed(name: str) -> None:
        began_s = perf_counter()
        outputs = by_speed.answer(x)
        rows.append(row(name, by_speed, (0, 1), (perf_counter() - began_s) * 1e3, outputs))

    first.set_rate(rates[0] / _SLOWER)
    for number in range(batches):
        timed(f"first {_SLOWER} times slower, batch {number + 1}")
    first.is_to_be_killed = True
    timed("first killed")
    return rows
