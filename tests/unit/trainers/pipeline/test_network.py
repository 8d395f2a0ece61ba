"""A pipeline of workers is the one process, bit for bit, by every schedule."""

from __future__ import annotations

import pytest
import torch

from support.pipelines import mlp, one_process, pipelined, points, same_gradients, share_of

torch.set_num_threads(1)

SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dual_pipe_v"]
STAGES = {"interleaved_1f1b": 2, "zbv": 2, "dual_pipe_v": 2}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_one_process_bit_for_bit(schedule: str, num_workers: int) -> None:
    model, make = mlp(13), points(5)
    # Uneven micro-batches, then fewer than there are stages, then one alone.
    shares = [share_of([3, 3, 2, 2, 2, 2], make), share_of([2, 1], make), share_of([1], make)]
    plain = one_process(model, shares)
    results = pipelined(model, shares, schedule, num_workers, STAGES.get(schedule, 1))
    reporting = [result for result in results if result.network.is_reporting]
    assert [result.losses for result in reporting] == [plain.losses]
    assert [result.metrics for result in results if result.metrics] == [plain.metrics]
    assert same_gradients(results, plain)
