"""Schedules for two stages a worker in a V: the first worker has the first stage and the last, and so on inwards.

The orders are those of `torch.distributed.pipelining` (ScheduleZBVZeroBubble, ScheduleDualPipeV).
"""

from __future__ import annotations

from collections import Counter

from orchestray.trainers.pipeline.actions import Action, Kind, Program
from orchestray.trainers.pipeline.schedules.place import Place


def zbv(place: Place, num_micro_batches: int) -> Program:
    """Without bubbles once it runs, where forward, backward of the input and of the weights take equally long.

    Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), section 6 (ZB-V).

    There must be at least 2 x num_workers - 1 micro-batches.
    """
    worker, num_workers, (down, up) = place
    write = _Writer()
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
    """Forward of one stage and backward of the other in pairs, whose computing and sending may overlap.

    DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 3.2.1, cut in half to a V. The two of a pair are given one
    after the other, the forward pass first.

    There must be at least 2 x num_workers micro-batches.
    """
    worker, num_workers, (down, up) = place
    num_hops = place.num_hops
    write = _Writer()
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
    # Of the last backward passes of this worker, about half, the later ones, put off their weights: the workers
    # before it wait for their inputs' half alone.
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
    """Writes a worker's program, numbering the micro-batches of each of its stages as they come."""

    def __init__(self) -> None:
        self.program: Program = []
        self.num_forward: Counter[int] = Counter()
        """Of each stage, so far."""
        self._num_backward: Counter[int] = Counter()
        self._waiting: list[Action] = []

    def forward(self, stage: int) -> None:
        self.program.append(Action(stage, Kind.FORWARD, self.num_forward[stage]))
        self.num_forward[stage] += 1

    def backward(self, stage: int) -> None:
        """Both halves in one."""
        self.program.append(Action(stage, Kind.BACKWARD, self._num_backward[stage]))
        self._num_backward[stage] += 1

    def backward_input(self, stage: int) -> None:
        """The half whose result another worker waits for; that of the weights will wait."""
        micro_batch = self._num_backward[stage]
        self.program.append(Action(stage, Kind.BACKWARD_INPUT, micro_batch))
        self._waiting.append(Action(stage, Kind.BACKWARD_WEIGHT, micro_batch))
        self._num_backward[stage] += 1

    def backward_weight(self, stage: int | None = None) -> None:
        """The half that has waited longest, of `stage` or of any."""
        first = next(action for action in self._waiting if stage in (None, action.stage))
        self._waiting.remove(first)
        self.program.append(first)

    def backward_in_halves(self, stage: int) -> None:
        """One right after the other: the gradient of the input is on its way before the weights' is computed."""
        self.backward_input(stage)
        self.program.append(self._waiting.pop())
