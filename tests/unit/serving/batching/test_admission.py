"""What is taken to be answerable in time where rounds of the event loop are longer than batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from orchestray.serving.batching import Batcher, Greedy
from orchestray.serving.batching.admission import Admission
from orchestray.serving.batching.queue import RequestQueue
from orchestray.serving.batching.runner import RunnerHandle
from orchestray.serving.batching.service_time import ServiceTimeModel

BATCH_SIZE, SEEN_S, PACE_S = 4, 0.018, 0.003
NUM_AHEAD = 5 * BATCH_SIZE + BATCH_SIZE - 1
"""The last of the sixth batch has so many ahead."""


async def echo(items: Sequence[int]) -> list[int]:
    return list(items)


def admission(pace_s: Callable[[], float] | None, round_s: float) -> Admission:
    """Of an idle runner whose batches were seen to take as long as a round."""
    model = ServiceTimeModel(BATCH_SIZE)
    for _ in range(20):
        model.observe(BATCH_SIZE, SEEN_S)
    keeper: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=BATCH_SIZE)
    runner: RunnerHandle[int, int] = RunnerHandle(keeper, echo, "runner", replace=None, pace_s=pace_s)
    found = Admission(RequestQueue(), [runner], model, BATCH_SIZE)
    found.came_round(round_s)
    return found


def is_feasible(found: Admission, left_s: float, num_ahead: int) -> bool:
    return found.is_feasible((0, 100.0 + left_s, num_ahead), 100.0 + left_s, 100.0, num_coming=num_ahead)


def test_a_runner_with_a_pace_runs_several_batches_in_a_long_round() -> None:
    assert admission(None, SEEN_S).full_batch_s == pytest.approx(SEEN_S)
    assert admission(lambda: PACE_S, SEEN_S).full_batch_s == pytest.approx(PACE_S)
    assert admission(lambda: PACE_S, PACE_S / 2).full_batch_s == pytest.approx(SEEN_S)  # a round is no reason then
    at_most = admission(lambda: SEEN_S / 100, SEEN_S).full_batch_s  # it is given eight in a round, and no more
    assert at_most == pytest.approx(SEEN_S / 8)


def test_who_is_behind_several_batches_is_refused_by_the_pace_and_the_round_in_which_their_end_is_seen() -> None:
    five_batches_s = 5 * PACE_S + SEEN_S + SEEN_S  # those ahead, its own as it is seen, and the rest of the round
    paced, unpaced = admission(lambda: PACE_S, SEEN_S), admission(None, SEEN_S)
    assert is_feasible(paced, five_batches_s + 1e-4, num_ahead=NUM_AHEAD)
    assert not is_feasible(paced, five_batches_s - 1e-4, num_ahead=NUM_AHEAD)
    assert not is_feasible(unpaced, five_batches_s + 1e-4, num_ahead=NUM_AHEAD)
    assert is_feasible(unpaced, 6 * SEEN_S + 1e-4, num_ahead=NUM_AHEAD)


def test_a_long_round_is_forgotten_within_a_few() -> None:
    found = admission(lambda: PACE_S, 1.0)
    assert found.round_s == 1.0
    for _ in range(8):
        found.came_round(PACE_S / 2)
    assert found.full_batch_s == pytest.approx(SEEN_S)
