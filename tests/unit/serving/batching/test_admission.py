"""Requests that count as answerable in time where rounds of the event loop are longer than batches."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from orchestray.platform.sim import event_loop
from orchestray.serving.batching import Batcher, DeadlineError, Greedy
from orchestray.serving.batching.admission import Admission, Lateness
from orchestray.serving.batching.policies.service_time import ServiceTimeModel
from orchestray.serving.batching.queue import Request, RequestQueue
from orchestray.serving.batching.runner import RunnerHandle
from support.batching import in_virtual_time

BATCH_SIZE, SEEN_S, PACE_S = 4, 0.018, 0.003
NUM_AHEAD = 5 * BATCH_SIZE + BATCH_SIZE - 1
"""Number of requests ahead of the last of the sixth batch."""


async def echo(items: Sequence[int]) -> list[int]:
    return list(items)


def admission(pace_s: Callable[[], float] | None, round_s: float) -> Admission:
    """Return the admission of an idle runner whose batches were seen to take as long as a round."""
    model = ServiceTimeModel(BATCH_SIZE)
    for _ in range(20):
        model.observe(BATCH_SIZE, SEEN_S)
    keeper: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=BATCH_SIZE)
    runner: RunnerHandle[int, int] = RunnerHandle(keeper, echo, "runner", replace=None, pace_s=pace_s)
    found = Admission(RequestQueue(), [runner], model, BATCH_SIZE)
    for _ in range(2):  # one long round may be a pause
        found.came_round(round_s)
    return found


def is_feasible(found: Admission, left_s: float, num_ahead: int, *, room: float = 1.0) -> bool:
    key = (0, 100.0 + left_s, num_ahead)
    return found.expected_s(key, 100.0 + left_s, 100.0, num_coming=num_ahead, room=room) is not None


def test_a_runner_with_a_pace_runs_several_batches_in_a_long_round() -> None:
    assert admission(None, SEEN_S).full_batch_s == pytest.approx(SEEN_S)
    assert admission(lambda: PACE_S, SEEN_S).full_batch_s == pytest.approx(PACE_S)
    assert admission(lambda: PACE_S, PACE_S / 20).full_batch_s == pytest.approx(SEEN_S)  # rounds do not count
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
        found.came_round(PACE_S / 20)
    assert found.full_batch_s == pytest.approx(SEEN_S)


def test_one_pause_is_no_round_of_the_loop() -> None:
    found = admission(lambda: PACE_S, PACE_S / 20)
    found.came_round(3.0)
    assert found.round_s == PACE_S / 20


def test_a_round_is_shared_once_among_the_batches_that_end_in_it() -> None:
    """Let several batches end together: each was learned to have had its part already."""
    found, num = admission(lambda: SEEN_S / 1000, 10 * SEEN_S), 4
    for _ in range(100):
        found.ended_together(num)
    assert found.full_batch_s == pytest.approx(SEEN_S * num / 8)


def test_runners_of_different_pace_are_as_fast_as_all_together() -> None:
    found = admission(lambda: PACE_S, SEEN_S)
    slow: RunnerHandle[int, int] = RunnerHandle(
        Batcher(policy=Greedy(), max_batch_size=BATCH_SIZE), echo, "slow", replace=None, pace_s=lambda: 3 * PACE_S
    )
    found._runners.append(slow)  # type: ignore[attr-defined]
    found.changed()
    per_s = 1 / PACE_S + 1 / (3 * PACE_S)
    assert found.full_batch_s == pytest.approx(2 / per_s)
    assert found.queue_s((0, 100.0, 1), 10 * BATCH_SIZE) == pytest.approx(10 / per_s)


def answered_later(found: Admission, *later_s: float) -> None:
    for seconds in later_s:
        found.lateness.note(100.0 + seconds, [promised(100.0)])


def test_what_predictions_leave_out_is_kept_free_as_far_as_is_asked_for() -> None:
    found = admission(None, 0.0)
    answered_later(found, *[0.01] * 20)
    for room in (1.0, 0.5):
        least_s = 2 * SEEN_S + 0.01 * room
        assert is_feasible(found, least_s + 1e-4, 2 * BATCH_SIZE - 1, room=room)
        assert not is_feasible(found, least_s - 1e-4, 2 * BATCH_SIZE - 1, room=room)


@in_virtual_time
async def test_who_was_let_through_before_it_was_read_is_not_refused_for_little_when_it_is_put() -> None:
    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=BATCH_SIZE)
    core = batcher._core
    batcher.add_runner(echo)
    for _ in range(20):
        core.model.observe(BATCH_SIZE, SEEN_S)
    answered_later(core.admission, *[0.02] * 20)
    now_s = asyncio.get_running_loop().time()
    waiting = [batcher.put(0, deadline_s=now_s + 0.05) for _ in range(BATCH_SIZE)]
    expected_s = core.admission.expected_s((0, now_s + 1, 99), now_s + 1, now_s, room=0.0)
    assert expected_s is not None
    deadline_s = expected_s + 0.015
    with pytest.raises(DeadlineError):
        batcher.put(1, deadline_s=deadline_s)  # nobody has asked before
    assert batcher.refusal(deadline_s + 0.01) is None
    waiting.append(batcher.put(1, deadline_s=deadline_s))
    await asyncio.gather(*waiting)
    await batcher.close()


def test_who_was_answered_earlier_than_predicted_leaves_no_room_and_one_pause_little() -> None:
    found = admission(None, 0.0)
    answered_later(found, *[-1.0] * 40, 5.0)
    assert found.lateness.room_s == 0.0


def test_however_late_requests_were_half_of_the_time_of_each_is_its_own() -> None:
    """Keep half of each request's time its own: else nothing that has to wait would be taken on, or learned from."""
    found = admission(None, 0.0)
    answered_later(found, *[100.0] * 20)
    assert is_feasible(found, 4 * SEEN_S + 1e-4, 2 * BATCH_SIZE - 1)
    assert not is_feasible(found, 4 * SEEN_S - 1e-4, 2 * BATCH_SIZE - 1)


def test_who_fits_into_the_next_batch_is_charged_nothing_for_what_predictions_leave_out() -> None:
    found = admission(None, 0.0)
    answered_later(found, *[0.01] * 20)
    assert is_feasible(found, SEEN_S + 1e-4, BATCH_SIZE - 1)
    assert not is_feasible(found, 2 * SEEN_S + 0.01 - 1e-4, 2 * BATCH_SIZE - 1)


def test_what_a_batch_is_late_by_is_counted_from_the_last_of_its_promises() -> None:
    """Leave out requests that were promised more and have been overtaken: the prediction did not fail them."""
    found = admission(None, 0.0)
    for _ in range(20):
        requests = [promised(100.0), promised(100.5), promised(math.inf)]
        found.lateness.note(100.51, requests)
    assert found.lateness.room_s == pytest.approx(0.01)


def promised(at_s: float) -> Request[int, int]:
    loop = asyncio.new_event_loop()
    request: Request[int, int] = Request(0, loop=loop, number=0, on_cancel=lambda _: None)
    loop.close()
    request.expected_s = at_s
    return request


async def halting(share_of_pauses: float, seed: int) -> tuple[int, int]:
    """Return how many are taken and answered under twice the load of a service.

    It halts now and then for five batches.
    """
    rng, loop = random.Random(seed), asyncio.get_running_loop()

    async def run(items: Sequence[int]) -> list[int]:
        await asyncio.sleep(0.02 if rng.random() < share_of_pauses else 0.004)
        return list(items)

    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=BATCH_SIZE)
    batcher.add_runner(run)
    taken: list[asyncio.Future[int]] = []
    for number in range(4000):
        with contextlib.suppress(DeadlineError):
            taken.append(batcher.put(number, deadline_s=loop.time() + 0.1))
        await asyncio.sleep(0.0005)
    found = await asyncio.gather(*taken, return_exceptions=True)
    await batcher.close()
    return len(taken), sum(isinstance(each, int) for each in found)


def test_where_a_service_halts_now_and_then_less_is_promised_in_vain_and_no_less_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_all() -> tuple[int, int]:
        found = [event_loop.run(halting(0.05, seed)) for seed in range(3)]
        return sum(taken for taken, _ in found), sum(answered for _, answered in found)

    num_taken, num_answered = in_all()
    monkeypatch.setattr(Lateness, "note", lambda *_: None)
    num_taken_blindly, num_answered_blindly = in_all()
    assert num_taken - num_answered < 0.7 * (num_taken_blindly - num_answered_blindly)
    assert num_answered >= num_answered_blindly


@dataclass(frozen=True)
class Kind:
    """A kind of requests: their part of all, their seconds and their priority."""

    share: float
    allowed_s: float
    priority: int = 0


async def in_time(rate_per_s: float, kinds: Sequence[Kind], seconds: Callable[[random.Random], float]) -> list[float]:
    """Return for each kind the share that is answered in time.

    Poisson arrivals come to a service of batches of eight that take `seconds`.
    """
    rng, loop = random.Random(1), asyncio.get_running_loop()

    async def run(items: Sequence[int]) -> list[int]:
        await asyncio.sleep(seconds(rng))
        return list(items)

    batcher: Batcher[int, int] = Batcher(policy=Greedy(), max_batch_size=8)
    batcher.add_runner(run)
    asked, answers = [0] * len(kinds), [[] for _ in kinds]  # type: ignore[var-annotated]
    for _ in range(3000):
        (kind,) = rng.choices(range(len(kinds)), [each.share for each in kinds])
        asked[kind] += 1
        with contextlib.suppress(DeadlineError):
            deadline_s = loop.time() + kinds[kind].allowed_s
            answers[kind].append(batcher.put(0, deadline_s=deadline_s, priority=kinds[kind].priority))
        await asyncio.sleep(rng.expovariate(rate_per_s))
    found = [await asyncio.gather(*each, return_exceptions=True) for each in answers]
    await batcher.close()
    return [sum(isinstance(one, int) for one in each) / num for each, num in zip(found, asked, strict=True)]


def test_below_capacity_batches_that_vary_keep_out_nobody_who_is_in_the_next_batch() -> None:
    """Check that no request is behind a queue that was filled to its deadline: there is none."""

    def now_and_then_double(rng: random.Random) -> float:
        return 0.06 if rng.random() < 0.06 else 0.03

    (share,) = event_loop.run(in_time(65.0, [Kind(1.0, 0.1)], now_and_then_double))
    assert share > 0.975


def test_who_has_overtaken_others_is_not_refused_for_what_they_have_waited() -> None:
    kinds = [Kind(0.5, 0.06, priority=1), Kind(0.5, 3.0)]
    urgent, _ = event_loop.run(in_time(440.0, kinds, lambda _: 0.02))
    assert urgent > 0.97
