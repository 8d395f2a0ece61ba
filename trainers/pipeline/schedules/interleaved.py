"""Schedules for several stages a worker in a loop: interleaved 1F1B, and its zero-bubble form.

A worker goes through its stages in rounds: so many micro-batches through its first stage, as many through its next.
The orders are those of `torch.distributed.pipelining` (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble).
"""

from __future__ import annotations

from orchestray.trainers.pipeline.actions import Action, Kind, Program
from orchestray.trainers.pipeline.schedules.place import Place


def round_size(num_workers: int, stages_per_worker: int, num_micro_batches: int) -> int | None:
    """Micro-batches of a round; None where the micro-batches do not fill rounds of one size.

    There are as many rounds as have a micro-batch for every worker, at least one; with one stage a worker there is
    nothing to take turns with, and all is one round.
    """
    num_rounds = 1 if stages_per_worker == 1 else max(1, num_micro_batches // num_workers)
    size, rest = divmod(num_micro_batches, num_rounds)
    return None if rest else size


def fitting(num_workers: int, stages_per_worker: int, num_micro_batches: int) -> int:
    """The least number of micro-batches, not below the given one, that fills rounds of one size."""
    while round_size(num_workers, stages_per_worker, num_micro_batches) is None:
        num_micro_batches += 1
    return num_micro_batches


def interleaved_1f1b(place: Place, num_micro_batches: int) -> Program:
    """A worker's stages in turn, one forward and one backward after the warm-up.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (SC 2021), section 2.2.2. The
    micro-batches must fill rounds of one size (see `fitting`).
    """
    orders = _Orders(place, num_micro_batches)
    num_warmup = orders.num_warmup(2 * place.num_hops)
    backward = [Action(stage, Kind.BACKWARD, micro_batch) for stage, micro_batch in orders.backward]
    program = orders.forward[:num_warmup]
    for ahead, behind in zip(orders.forward[num_warmup:], backward, strict=False):
        program += [ahead, behind]
    return program + backward[len(backward) - num_warmup :]


def zero_bubble(place: Place, num_micro_batches: int) -> Program:
    """Interleaved 1F1B with the backward pass in halves: the weights' half waits, and fills what would be bubbles.

    With one stage a worker it holds no more activations than 1F1B does on its first worker. Qi et al., Zero Bubble
    Pipeline Parallelism (ICLR 2024), section 2.1 (ZB-H1).
    The micro-batches must fill rounds of one size.
    """
    orders = _Orders(place, num_micro_batches)
    num_warmup = orders.num_warmup(place.num_hops)
    weights = [Action(stage, Kind.BACKWARD_WEIGHT, micro_batch) for stage, micro_batch in orders.backward]
    program = orders.forward[:num_warmup]
    for done, (stage, micro_batch) in enumerate(orders.backward):
        program += orders.forward[num_warmup + done : num_warmup + done + 1]
        program.append(Action(stage, Kind.BACKWARD_INPUT, micro_batch))
        if done >= place.worker:
            program.append(weights[done - place.worker])
    return program + weights[max(0, len(weights) - place.worker) :]


class _Orders:
    """In which order a worker does its forward and its backward passes, each taken alone."""

    def __init__(self, place: Place, num_micro_batches: int) -> None:
        stages = place.stages
        size = round_size(place.num_workers, len(stages), num_micro_batches)
        if size is None:
            raise ValueError(f"{num_micro_batches} micro-batches do not fill rounds of one size: see `fitting`")
        self._num_held_back = (len(stages) - 1) * size
        rounds = [range(start, start + size) for start in range(0, num_micro_batches, size)]
        self.forward = [Action(stage, Kind.FORWARD, each) for batch in rounds for stage in stages for each in batch]
        self.backward = [(stage, each) for batch in rounds for stage in reversed(stages) for each in batch]

    def num_warmup(self, num_hops: int) -> int:
        """Forward passes before the first backward, when that takes `num_hops` more to come back to this worker."""
        return min(self._num_held_back + num_hops, len(self.forward))
