"""The built-in digits, whose steps take ever longer for as long as a file is there: time to do something to the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from orchestray.trainers.tasks.digits import Digits

LEAST_S = 0.02
SHARE = 0.25
SMALL_SHARE = 0.02
"""For what is to be seen going on in the time in which a process starts: many steps are done in it."""
_LOOK_S = 0.02


class Slowing:
    """A pause that makes the steps of a process ever longer while a file is there.

    A test needs time to see a run and to do something to it; how long depends on the machine. No fixed length of a step
    is enough on all machines. Here each step comes to its end, as changes of a run need, and the run does not.
    """

    _left: ClassVar[dict[Path, int]] = {}
    """Micro-batches before the next that takes longer."""
    _since_s: ClassVar[dict[Path, float]] = {}

    def __init__(
        self, slow: str, *, quick: int = 0, parts: int = 1, share: float = SHARE, least_s: float = LEAST_S
    ) -> None:
        """
        Args:
            slow: the file.
            quick: number of first steps of the process that take no longer.
            parts: micro-batches of a step.
            share: how much longer the others take, as a part of the time since the first of them.
            least_s: how much longer they take at least, in seconds.
        """
        self._slow, self._parts, self._share, self._least_s = Path(slow), parts, share, least_s
        self._left.setdefault(self._slow, quick * parts)  # by process: a task may be built for each trial, or kept

    def pause(self) -> None:
        """Pause in a micro-batch that is trained on; to be called once in each."""
        if not torch.is_grad_enabled():
            return
        if self._left[self._slow] > 0:
            self._left[self._slow] -= 1
            return
        self._left[self._slow] = self._parts - 1
        now_s = time.monotonic()
        so_far_s = now_s - self._since_s.setdefault(self._slow, now_s)
        until_s = now_s + max(self._least_s, self._share * so_far_s)
        while self._slow.exists() and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))


class SlowDigits(Digits):
    """The task `Digits` with steps that take ever longer while the file `slow` is there: see `Slowing`."""

    def __init__(self, slow: str, quick: int, parts: int = 1, share: float = SHARE, **digits: Any) -> None:
        super().__init__(**digits)
        self._slowing = Slowing(slow, quick=quick, parts=parts, share=share)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self._slowing.pause()
        return super().loss(outputs, batch)


def slowly(runs: Path, quick: int, *, parts: int = 1, share: float = SHARE) -> tuple[list[str], Path]:
    """Return the overrides that make the steps of a run of the digits slow, and the file that keeps them slow.

    Args:
        runs: where the file is put.
        quick: steps of each process that are not slow: what the test waits for should come with them.
        parts: micro-batches of a step.
        share: how much longer a step takes, as a part of the time since the first slow one.
    """
    slow = runs / "slow"
    slow.touch()
    arguments = {"slow": slow, "quick": quick, "parts": parts, "share": share}
    task = f"task.type={Path(__file__).resolve()}:SlowDigits"
    return [task, *(f"task.{name}={value}" for name, value in arguments.items())], slow
