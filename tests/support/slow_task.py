"""A task whose steps take ever longer for as long as a file is there: time to do something to the run."""

from __future__ import annotations

from torch import Tensor

from support.slow_digits import Slowing
from support.tiny_task import TinyTask

LEAST_S = 0.3
SHARE = 0.1


class SlowTask(TinyTask):
    """A `TinyTask` whose shares of a step take `LEAST_S` seconds longer, or more, while the file `slow` is there."""

    def __init__(self, slow: str) -> None:
        super().__init__(num_samples=80)
        self._slowing = Slowing(slow, share=SHARE, least_s=LEAST_S)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self._slowing.pause()
        return super().loss(outputs, batch)
