"""The decision to take a new version back, on a clock of the test's own."""

from __future__ import annotations

import random

import pytest

from orchestray.serving.routing.rollback import Verdict

STEP_S = 0.25


def went_back_after_s(
    *,
    seed: int = 0,
    per_s: float = 50.0,
    fails: float = 0.0,
    slow: float = 0.0,
    from_s: float = 0.0,
    for_s: float = 60.0,
    error_rate: float | None = 1.0,
    p99_ms: float | None = 100.0,
) -> float | None:
    """Return the seconds from when the version turned bad until it goes back; None: it does not."""
    rng, verdict = random.Random(seed), Verdict(0.0, error_rate=error_rate, p99_ms=p99_ms)
    now_s, look_s = 0.0, STEP_S
    while now_s < for_s:
        now_s += rng.expovariate(per_s)
        while look_s <= now_s:
            if verdict.reason(look_s, 0) is not None:
                return look_s - from_s
            look_s += STEP_S
        is_bad = now_s >= from_s
        status = 500 if is_bad and rng.random() < fails else 200
        verdict.answered(now_s, status, 0.2 if is_bad and rng.random() < slow else 0.001)
    return None


@pytest.mark.parametrize("seed", range(20))
def test_a_version_that_breaks_a_bound_clearly_goes_back_within_ten_seconds_early_or_late_in_the_watch(
    seed: int,
) -> None:
    for per_s, bad in ((50.0, 0.1), (500.0, 0.05), (5.0, 0.8)):
        for from_s in (0.0, 45.0):
            for kind in ({"fails": bad}, {"slow": bad}):
                after_s = went_back_after_s(seed=seed, per_s=per_s, from_s=from_s, **kind)  # type: ignore[arg-type]
                assert (10.1 if after_s is None else after_s) <= 10.0, (per_s, bad, from_s, kind)


def test_chance_takes_back_hardly_a_version_that_keeps_its_bounds() -> None:
    """Fail, and be late, half as often as the bounds allow: a sample of a few requests is above them now and then."""
    gone = [went_back_after_s(seed=seed, fails=0.005, slow=0.005) for seed in range(100)]
    assert sum(after_s is not None for after_s in gone) <= 1


def test_only_the_bounds_that_are_set_count_and_a_bound_of_none_at_all_allows_no_failure() -> None:
    assert went_back_after_s(fails=1.0, error_rate=None) is None
    assert went_back_after_s(slow=1.0, p99_ms=None) is None
    verdict = Verdict(0.0, error_rate=0.0, p99_ms=None)
    verdict.answered(1.0, 500, 0.1)
    assert verdict.reason(1.0, 0) == "1 of 1 requests failed, more than 0 %"


def test_answers_to_requests_from_before_the_change_and_to_wrong_requests_do_not_count() -> None:
    verdict = Verdict(10.0, error_rate=0.0, p99_ms=100.0)
    for _ in range(100):
        verdict.answered(10.5, 500, 0.6)
        verdict.answered(10.5, 422, 0.01)
    assert verdict.reason(10.5, 0) is None


def test_a_version_that_answers_nothing_goes_back_within_ten_seconds() -> None:
    verdict = Verdict(0.0, error_rate=1.0, p99_ms=None)
    looks = [round(0.25 * step, 2) for step in range(1, 41)]
    gone_s = next(at_s for at_s in looks if verdict.reason(at_s, 1 if at_s > 2.0 else 0) is not None)
    assert 5.0 < gone_s <= 10.0


@pytest.mark.parametrize("status", [499, 503, 504, 422])
def test_clients_that_give_up_and_refusals_are_no_signs_of_life(status: int) -> None:
    verdict = Verdict(0.0, error_rate=None, p99_ms=None)
    for step in range(1, 41):
        verdict.answered(0.25 * step, status, 0.1)
        if (reason := verdict.reason(0.25 * step, 1)) is not None:
            break
    assert reason == "no request was answered for 5 s"


@pytest.mark.parametrize("status", [200, 500])
def test_a_version_that_answers_or_fails_is_not_silent(status: int) -> None:
    verdict = Verdict(0.0, error_rate=None, p99_ms=None)
    for step in range(1, 241):
        verdict.answered(0.25 * step, status, 0.1)
        assert verdict.reason(0.25 * step, 1) is None


def test_what_waits_for_a_first_replica_is_no_silence_and_not_late_and_what_comes_after_it_is() -> None:
    verdict = Verdict(0.0, error_rate=1.0, p99_ms=100.0)
    for step in range(1, 81):
        verdict.starts(0.25 * step)
        verdict.answered(0.25 * step, 503, 0.001)
        assert verdict.reason(0.25 * step, 1) is None
    for _ in range(10):
        verdict.answered(21.0, 200, 15.0)
    assert verdict.reason(21.0, 1) is None
    assert verdict.reason(26.0, 1) is None
    assert verdict.reason(26.25, 1) == "no request was answered for 5 s"
    verdict.answered(26.5, 200, 0.2)
    verdict.answered(26.5, 200, 0.2)
    assert verdict.reason(26.5, 1) == "2 of 2 requests took more than 100 ms"


def test_a_version_that_fails_whenever_a_replica_has_come_goes_back() -> None:
    verdict = Verdict(0.0, error_rate=1.0, p99_ms=None)
    verdict.starts(10.0)
    verdict.answered(10.5, 500, 5.0)
    verdict.answered(10.5, 500, 5.0)
    assert verdict.reason(10.5, 0) == "2 of 2 requests failed, more than 1 %"


def test_time_in_which_nothing_was_asked_is_no_silence() -> None:
    verdict = Verdict(0.0, error_rate=1.0, p99_ms=None)
    verdict.answered(1.0, 200, 0.1)
    assert verdict.reason(1.25, 1) is None
    assert verdict.reason(1.5, 0) is None
    assert verdict.reason(60.0, 1) is None, "it was idle for a minute"
    assert verdict.reason(65.0, 1) is None
    assert verdict.reason(65.25, 1) == "no request was answered for 5 s"


def test_a_version_that_may_take_long_is_silent_as_long() -> None:
    verdict = Verdict(0.0, error_rate=None, p99_ms=20_000.0)
    assert verdict.reason(0.25, 1) is None
    assert verdict.reason(20.25, 1) is None
    assert verdict.reason(20.5, 1) == "no request was answered for 20 s"


def test_failures_of_long_ago_do_not_count_among_those_of_the_last_seconds() -> None:
    verdict = Verdict(0.0, error_rate=50.0, p99_ms=None)
    for step in range(8):
        verdict.answered(0.5 * step, 500, 0.01)
    for step in range(4000):
        verdict.answered(4.0 + 0.001 * step, 200, 0.01)
    for step in range(20):
        verdict.answered(20.0, 500, 0.01)
        is_recent = step + 1 >= 10  # 10 of 10 in a row are more than chance where every second one may fail
        assert (verdict.reason(20.0, 0) is not None) == is_recent, step
        if is_recent:
            break
    assert verdict.reason(20.0, 0) == "10 of 10 requests failed, more than 50 %"


def test_failures_that_are_too_rare_for_the_last_seconds_count_over_the_whole_watch() -> None:
    verdict = Verdict(0.0, error_rate=1.0, p99_ms=None)
    verdict.answered(1.0, 500, 0.01)
    assert verdict.reason(1.0, 0) is None, "one of one may be chance"
    verdict.answered(30.0, 500, 0.01)
    assert verdict.reason(30.0, 0) == "2 of 2 requests failed, more than 1 %"
