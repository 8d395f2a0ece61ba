"""Schedules for two stages a worker in a V: the first worker has the first and the last stage, and so on inwards.

The orders are those of `torch.distributed.pipelining` (ScheduleZBVZeroBubble, ScheduleDualPipeV).
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestray.trainers.parallel.pipeline.schedules.actions import Action, Kind, Program, passes
from orchestray.trainers.parallel.pipeline.schedules.place import Place


def zbv(place: Place, num_micro_batches: int) -> Program:
    """Run without bubbles after the warm-up, if forward and both backward halves take equally long.

    Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), section 6 (ZB-V). The least number of micro-batches is 2 x
    num_workers - 1.
    """
    worker, num_workers, (down, up) = place
    write = _Writer(place.stages, num_micro_batches)
    for _ in range(2 * (num_workers - worker) - 1):
        write.forward(down)
    for _ in range(worker):
        write.forward(up)
        write.forward(down)
    for _ in range(num_workers - worker):
        write.forward(up)
        write.backward_in_halves(up)
    while write.num_forward[up] < num_micro_batches:
        if write.num_forward[down] < num_micro_batches:
            write.forward(down)
        write.backward_in_halves(down)
        write.forward(up)
        write.backward_in_halves(up)
    for _ in range(worker):
        write.backward_input(down)
        write.backward_input(up)
    for _ in range(num_workers - worker):
        write.backward_input(down)
        write.backward_weight(down)
    for stage in (up, down):
        for _ in range(worker):
            write.backward_weight(stage)
    return write.program


def dual_pipe_v(place: Place, num_micro_batches: int) -> Program:
    """Pair the forward of one stage with the backward of the other, so that computing and sending may overlap.

    DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 3.2.1, cut in half to a V. The two actions of a pair
    follow each other, the forward pass first. There must be at least 2 x num_workers micro-batches.
    """
    worker, num_workers, (down, up) = place
    num_hops = place.num_hops
    write = _Writer(place.stages, num_micro_batches)
    for _ in range(2 * num_hops):
        write.forward(down)
    for _ in range(worker + 1):
        write.forward(down)
        write.forward(up)
    for _ in range(num_hops):
        write.backward_in_halves(up)
        write.forward(up)
    for _ in range(num_micro_batches - 2 * num_workers + worker + 1):
        write.forward(down)
        write.backward(up)
        write.forward(up)
        write.backward(down)
    for _ in range(num_hops):
        write.backward(up)
        write.forward(up)
        write.backward(down)
    # The later half of this worker's last backward passes defers the weights' half: the workers before it wait for
    # the inputs' half alone.
    for turn in range(2 * (worker + 1)):
        stage = down if turn % 2 else up
        write.backward(stage) if turn <= worker else write.backward_input(stage)
    for _ in range(num_hops):
        write.backward_weight()
        write.backward_input(down)
    for _ in range(worker + 1):
        write.backward_weight()
    return write.program


class _Writer:
    """A writer of a worker's program; it numbers the micro-batches of each stage as they come."""

    def __init__(self, stages: Sequence[int], num_micro_batches: int) -> None:
        self.program: Program = []
        self.num_forward = dict.fromkeys(stages, 0)
        """Number of forward passes of each stage so far."""
        self._num_backward = dict.fromkeys(stages, 0)
        self._waiting: list[Action] = []
        self._passes = {(stage, kind): passes(stage, kind, num_micro_batches) for stage in stages for kind in Kind}

    def forward(self, stage: int) -> None:
        micro_batch = self.num_forward[stage]
        self.program.append(self._passes[stage, Kind.FORWARD][micro_batch])
        self.num_forward[stage] = micro_batch + 1

    def backward(self, stage: int) -> None:
        """Append a whole backward pass."""
        micro_batch = self._num_backward[stage]
        self.program.append(self._passes[stage, Kind.BACKWARD][micro_batch])
        self._num_backward[stage] = micro_batch + 1

    def backward_input(self, stage: int) -> None:
        """Append the half whose result another worker waits for, and defer the weights' half."""
        micro_batch = self._num_backward[stage]
        self.program.append(self._passes[stage, Kind.BACKWARD_INPUT][micro_batch])
        self._waiting.append(self._passes[stage, Kind.BACKWARD_WEIGHT][micro_batch])
        self._num_backward[stage] = micro_batch + 1

    def backward_weight(self, stage: int | None = None) -> None:
        """Append the weights' half that has waited longest, of `stage` or of any stage."""
        first = next(action for action in self._waiting if stage in (None, action.stage))
        self._waiting.remove(first)
        self.program.append(first)

    def backward_in_halves(self, stage: int) -> None:
        """Append both halves: the gradient of the input is on its way before the weights' is computed."""
        self.backward_input(stage)
        self.program.append(self._waiting.pop())
