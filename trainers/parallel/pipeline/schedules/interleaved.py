"""Schedules for several stages a worker in a loop: interleaved 1F1B, and its zero-bubble form.

A worker goes through its stages in rounds: a number of micro-batches through its first stage, then the same number
through its next. The orders are those of `torch.distributed.pipelining` (ScheduleInterleaved1F1B,
ScheduleInterleavedZeroBubble).
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestray.trainers.parallel.pipeline.schedules.actions import Action, Kind, Program, passes
from orchestray.trainers.parallel.pipeline.schedules.place import Place


def round_size(num_workers: int, stages_per_worker: int, num_micro_batches: int) -> int | None:
    """Return the number of micro-batches in a round; None if they do not fill rounds of one size.

    There are as many rounds as have a micro-batch for every worker, and at least one. With one stage a worker all
    micro-batches form one round.
    """
    num_rounds = 1 if stages_per_worker == 1 else max(1, num_micro_batches // num_workers)
    size, rest = divmod(num_micro_batches, num_rounds)
    return None if rest else size


def fitting(num_workers: int, stages_per_worker: int, num_micro_batches: int) -> int:
    """Return the smallest number of micro-batches, at least the given one, that fills rounds of one size."""
    while round_size(num_workers, stages_per_worker, num_micro_batches) is None:
        num_micro_batches += 1
    return num_micro_batches


def interleaved_1f1b(place: Place, num_micro_batches: int) -> Program:
    """Alternate between a worker's stages; after the warm-up, one forward then one backward.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (SC 2021), section 2.2.2. The
    micro-batches must fill rounds of one size (see `fitting`).
    """
    orders = _Orders(place, num_micro_batches)
    num_warmup = orders.num_warmup(2 * place.num_hops)
    backward = orders.backward(Kind.BACKWARD)
    program = orders.forward[:num_warmup]
    for ahead, behind in zip(orders.forward[num_warmup:], backward, strict=False):
        program += [ahead, behind]
    return program + backward[len(backward) - num_warmup :]


def zero_bubble(place: Place, num_micro_batches: int) -> Program:
    """Run interleaved 1F1B with the backward pass in halves: the weights' half waits, and fills what would be bubbles.

    With one stage a worker, no worker holds more activations than the first worker does in 1F1B. Qi et al., Zero Bubble
    Pipeline Parallelism (ICLR 2024), section 2.1 (ZB-H1). The micro-batches must fill rounds of one size.
    """
    orders = _Orders(place, num_micro_batches)
    num_warmup = orders.num_warmup(place.num_hops)
    weights = orders.backward(Kind.BACKWARD_WEIGHT)
    program = orders.forward[:num_warmup]
    for done, behind in enumerate(orders.backward(Kind.BACKWARD_INPUT)):
        program += orders.forward[num_warmup + done : num_warmup + done + 1]
        program.append(behind)
        if done >= place.worker:
            program.append(weights[done - place.worker])
    return program + weights[max(0, len(weights) - place.worker) :]


class _Orders:
    """The order of a worker's forward passes, and that of its backward passes, each on its own."""

    def __init__(self, place: Place, num_micro_batches: int) -> None:
        stages = place.stages
        size = round_size(place.num_workers, len(stages), num_micro_batches)
        if size is None:
            raise ValueError(f"{num_micro_batches} micro-batches do not fill rounds of one size: see `fitting`")
        self._stages, self._num_held_back = stages, (len(stages) - 1) * size
        self._rounds = [slice(start, start + size) for start in range(0, num_micro_batches, size)]
        self._num_micro_batches = num_micro_batches
        self.forward = self._in_rounds(Kind.FORWARD, stages)

    def backward(self, kind: Kind) -> list[Action]:
        """Return the backward passes, or one half of each."""
        return self._in_rounds(kind, self._stages[::-1])

    def _in_rounds(self, kind: Kind, stages: Sequence[int]) -> list[Action]:
        each = [passes(stage, kind, self._num_micro_batches) for stage in stages]
        return [action for batch in self._rounds for of_stage in each for action in of_stage[batch]]

    def num_warmup(self, num_hops: int) -> int:
        """Return how many forward passes come before the first backward, `num_hops`
        of them while it comes back here.
        """
        return min(self._num_held_back + num_hops, len(self.forward))
