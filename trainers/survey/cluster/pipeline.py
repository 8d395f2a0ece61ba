"""A step of many pipelines in virtual time: one schedule, whose workers differ in speed, vectorised over pipelines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchestray.trainers.parallel.pipeline.schedules import default_stages_per_worker, make_programs, placement
from orchestray.trainers.parallel.pipeline.schedules.actions import Action, Kind
from orchestray.trainers.parallel.pipeline.simulation import needs, simulate

FORWARD_SHARE = 1 / 3
"""Share of a step's computation that is the forward pass: the backward pass takes twice its operations."""


class Pipelines:
    """A schedule of a step, ready to be run by any number of pipelines at once.

    Args:
        schedule: one of `SCHEDULE_NAMES`.
        num_workers: workers along a pipeline.
        num_micro_batches: micro-batches of a step.
        transfer_s: seconds between the end of an action and the earliest begin of one on another worker that needs it.
        stages_per_worker: default: that of the schedule.

    Raises:
        ValueError: the schedule cannot be planned for these numbers.
    """

    def __init__(
        self,
        schedule: str,
        num_workers: int,
        num_micro_batches: int,
        transfer_s: float = 0.0,
        stages_per_worker: int | None = None,
    ) -> None:
        each = stages_per_worker or default_stages_per_worker(schedule)
        self._programs = make_programs(schedule, num_workers, each, num_micro_batches)
        self._placement = placement(schedule, num_workers, each)
        self._parts = each * num_micro_batches
        self._transfer_s = transfer_s
        # An order in which every action comes after those that it needs, whatever the durations are.
        order = simulate(self._programs, self._placement, 1.0, 2.0)
        self._order = sorted(order.times.values(), key=lambda timed: (timed.begin_s, timed.end_s))

    def step_s(self, compute_s: NDArray[np.float64], ready_s: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Return the time at which each worker has done its last action, [pipelines, workers].

        Args:
            compute_s: seconds of computation of each worker in the whole step, [pipelines, workers].
            ready_s: time at which each worker may begin, [pipelines, workers]; default: 0.
        """
        part_s = compute_s / self._parts
        worker_of = {stage: worker for worker, stages in enumerate(self._placement) for stage in stages}
        end_s: dict[Action, NDArray[np.float64]] = {}
        free_s = np.zeros_like(part_s) if ready_s is None else ready_s.copy()
        for worker, action, _, _ in self._order:
            begin_s = free_s[:, worker]
            for needed in needs(action, len(worker_of), end_s):
                is_near = worker_of[needed.stage] == worker
                begin_s = np.maximum(begin_s, end_s[needed] + (0.0 if is_near else self._transfer_s))
            end_s[action] = free_s[:, worker] = begin_s + part_s[:, worker] * _SHARES[action.kind]
        return free_s


_SHARES = {
    Kind.FORWARD: FORWARD_SHARE,
    Kind.BACKWARD: 1 - FORWARD_SHARE,
    Kind.BACKWARD_INPUT: (1 - FORWARD_SHARE) / 2,
    Kind.BACKWARD_WEIGHT: (1 - FORWARD_SHARE) / 2,
}
