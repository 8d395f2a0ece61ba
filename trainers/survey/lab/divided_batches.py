"""Batches that several devices answer together, each a part in proportion to its speed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from orchestray.platform.errors import ClusterError
from orchestray.trainers.ps.protocol.load_balancing import Speeds

Finish: TypeAlias = Callable[[], tuple[np.ndarray, float]]
"""Waits for a device; returns its outputs, [samples, ...], and the seconds that it took for them."""


class DeviceLostError(Exception):
    """Raised when a device is gone, and what it was given is not answered."""


class Device(ABC):
    """A device that answers samples, whatever its speed."""

    @abstractmethod
    def start(self, x: np.ndarray) -> Finish:
        """Begin to answer samples, and do not wait for it.

        Args:
            x: inputs, [samples, ...].

        Returns:
            A function for the outputs; it raises DeviceLostError if the device is gone.
        """


class DividedBatches:
    """Batches divided over devices of unlike speed.

    Source: Hadjis et al. 2015, "Caffe con Troll: shallow ideas to speed up deep learning" (a CPU and a GPU answer parts
    of one batch in proportion to what each can compute).

    Here parts are proportional to the samples per second that each device was seen to answer (`Speeds`). So all of them
    are done at the same time, also after a speed has changed. The part of a device that is lost the others answer.

    Args:
        devices: devices, of which each answers as the others do.
        is_by_speed: False for equal parts, whatever the speeds.
    """

    def __init__(self, devices: Sequence[Device], *, is_by_speed: bool = True) -> None:
        self._devices = dict(enumerate(devices))
        self._is_by_speed = is_by_speed
        self._speeds = Speeds()
        self.answered: Mapping[int, int] = {}
        """Samples of the last batch by the number of the device that answered them."""

    def parts(self, num_samples: int) -> dict[int, int]:
        """Return how many samples each device should answer, by its number; their sum is `num_samples`.

        What rounding takes from a device in one batch it gets in a later one: call this once for each batch.

        Raises:
            ClusterError: no device is left.
        """
        if not self._devices:
            raise ClusterError("No device is left that could answer a batch.")
        sizes, self._speeds.owed = self._speeds.parts([*self._devices], 0, num_samples)
        return dict(zip(self._devices, sizes, strict=True))

    def answer(self, x: np.ndarray) -> np.ndarray:
        """Return the outputs of a batch, in its order.

        Args:
            x: inputs, [samples, ...], of one sample at least.

        Raises:
            ClusterError: no device is left.
        """
        missing = np.arange(len(x))
        rows_of: list[tuple[int, np.ndarray]] = []
        outputs: list[np.ndarray] = []
        while len(missing):
            parts = self.parts(len(missing))
            cuts = np.split(missing, np.cumsum([*parts.values()])[:-1])
            begun = [
                (number, rows, self._devices[number].start(x[rows]))
                for number, rows in zip(parts, cuts, strict=True)
                if len(rows)
            ]
            lost = [missing[:0]]
            for number, rows, finish in begun:
                try:
                    answered, took_s = finish()
                except DeviceLostError:
                    lost.append(rows)
                    del self._devices[number]
                    self._speeds.forget(number)
                    continue
                rows_of.append((number, rows))
                outputs.append(answered)
                if self._is_by_speed:
                    self._speeds.note(number, len(rows), took_s)
            missing = np.concatenate(lost)
        self.answered = {number: sum(len(rows) for one, rows in rows_of if one == number) for number, _ in rows_of}
        order = np.argsort(np.concatenate([rows for _, rows in rows_of]))
        whole: np.ndarray = np.concatenate(outputs)[order]
        return whole
