"""Objects that a gang's members host in tests."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from orchestray.platform.errors import TrainingError
from orchestray.platform.process.wait_clock import Waiting
from support.patience import PATIENCE_S


class Adder:
    """An actor that adds tensors over its process group, and can be made to hang or fail."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._released = threading.Event()

    def total(self) -> float:
        tensor = torch.tensor([self.value + dist.get_rank()])
        dist.all_reduce(tensor)
        return float(tensor)

    def pid(self) -> int:
        return os.getpid()

    def threads(self) -> int:
        return torch.get_num_threads()

    def fail(self) -> None:
        raise TrainingError("the loss is a banana")

    def wait(self) -> bool:
        """Block the working thread until `release` is called beside it."""
        return self._released.wait(PATIENCE_S)

    def wait_for_others(self) -> bool:
        """Block the working thread like `wait`, as one that waits for other processes."""
        with Waiting().during():
            return self.wait()

    def release(self) -> None:
        self._released.set()

    def close(self) -> None:
        self.release()


class StopsAsItIsBuilt:
    """An actor whose process is stopped while it is built."""

    def __init__(self) -> None:
        # To this thread: a signal to the process may reach another one first, while this one answers.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class Broken:
    def __init__(self) -> None:
        raise TrainingError("it cannot be built")


class Teller:
    """An actor with lines for the first caller of `drain`."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = lines

    def pid(self) -> int:
        return os.getpid()

    def drain(self) -> list[dict[str, Any]]:
        lines, self._lines = self._lines, []
        return lines

    def close(self) -> None:
        return
