"""The truth of what is measured, in virtual time: against servers whose every latency is known."""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
from collections.abc import Callable
from functools import partial

import pytest

from orchestray.loadtest.drive import Driver
from orchestray.loadtest.loads import ClosedLoop, OpenLoop
from orchestray.loadtest.plan import Plan, Target
from orchestray.loadtest.results import Measured
from orchestray.loadtest.tally import Outcome, Tally
from orchestray.platform.sim import event_loop


class LoopAlarm:
    """An alarm by a timer of the loop, whose clock may jump ahead."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        self.close()
        self._timer = self._loop.call_later(max(0.0, when_s - self._clock()), call)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Server:
    """A server that answers each request with 200 at the time that `finish_s` gives for when it was sent."""

    def __init__(self, finish_s: Callable[[float], float], outcome: Outcome = 200) -> None:
        self._finish_s = finish_s
        self._outcome = outcome
        self.sent_s: list[float] = []

    def send(self, due_s: float, answered: Callable[[Outcome], None]) -> None:
        loop = asyncio.get_running_loop()
        self.sent_s.append(loop.time())
        loop.call_at(self._finish_s(loop.time()), answered, self._outcome)


class OneByOne:
    """Finishing times of a server that works on one request at a time, in order."""

    def __init__(self, service_s: float) -> None:
        self.service_s, self.free_s = service_s, 0.0

    def __call__(self, now_s: float) -> float:
        self.free_s = max(self.free_s, now_s) + self.service_s
        return self.free_s


def open_loop(server: Server, times_s: list[float], tally: Tally) -> Tally:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        await Driver(server.send, tally, clock, clock()).open_loop(iter(times_s), LoopAlarm(clock))

    event_loop.run(main())
    return tally


def closed_loop(server: Server, num_clients: int, think_s: float, tally: Tally) -> Tally:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        await Driver(server.send, tally, clock, clock()).closed_loop(num_clients, think_s)

    event_loop.run(main())
    return tally


@pytest.mark.parametrize("outcome", [200, 503])
def test_of_clients_that_wait_for_nothing_else_all_are_under_way_whatever_the_answers(outcome: int) -> None:
    tally = closed_loop(Server(OneByOne(0.01), outcome), 4, 0.0, Tally(1.0, 11.0))
    measured = Measured(Plan(Target("127.0.0.1", 80, "/"), ClosedLoop(4), duration_s=10.0, warm_up_s=1.0), tally, ())
    assert measured.mean_in_flight == pytest.approx(4.0, rel=0.01)  # those at the end were due before it
    kept = tally.latency if outcome == 200 else tally.refused
    assert measured.summary()["mean_in_flight"] == pytest.approx(kept.num / 10.0 * kept.mean_s, rel=1e-4)


def test_a_known_service_time_is_what_is_measured() -> None:
    tally = open_loop(Server(lambda now_s: now_s + 0.02), [0.1 * k for k in range(50)], Tally(0.0, 5.0))
    assert tally.num_offered == tally.latency.num == 50
    assert tally.latency.min_s == pytest.approx(0.02)
    assert tally.latency.max_s == pytest.approx(0.02)
    assert tally.statuses == {200: 50}
    assert tally.lag.max_s < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_latencies_of_a_queue_are_those_of_lindleys_recursion(seed: int) -> None:
    due_s = list(itertools.takewhile(lambda at: at < 20.0, OpenLoop(40.0).times_s(seed)))
    free_s, expected = 0.0, []
    for at in due_s:
        free_s = max(free_s, at) + 0.02
        expected.append(free_s - at)
    tally = open_loop(Server(OneByOne(0.02)), due_s, Tally(0.0, 20.0))
    assert tally.latency.num == len(expected)
    assert tally.latency.sum_s == pytest.approx(sum(expected), rel=1e-9)
    assert tally.latency.max_s == pytest.approx(max(expected), rel=1e-9)
    exact = sorted(expected)[math.ceil(0.99 * len(expected)) - 1]
    assert tally.latency.quantile_s(0.99) == pytest.approx(exact, rel=1e-3)


def stalls_once(now_s: float) -> float:
    """Take 1 ms a request, but answer nothing from second 4 to second 5."""
    return max(now_s, 5.0) + 0.001 if 4.0 <= now_s < 5.0 else now_s + 0.001


def test_a_stall_is_seen_by_every_request_that_was_due_in_it() -> None:
    """Let 100 requests (100/s) meet a stall of 1 s, and wait half a second on average: p99 of 1,000 is 0.9 s.

    A closed loop of one client ("coordinated omission") meets it once, and its p99 is that of a server without a stall.
    """
    times_s = [k / 100 for k in range(1000)]
    seen = open_loop(Server(stalls_once), times_s, Tally(0.0, 10.0)).latency
    assert seen.num == 1000
    assert seen.quantile_s(0.9) == pytest.approx(0.001, rel=0.01)
    assert seen.quantile_s(0.95) == pytest.approx(0.501, abs=0.011)
    assert seen.quantile_s(0.99) == pytest.approx(0.901, abs=0.011)
    assert seen.mean_s == pytest.approx(0.001 + 0.1 * 0.505, rel=0.01)
    omitted = closed_loop(Server(stalls_once), 1, 0.009, Tally(0.0, 10.0)).latency
    assert omitted.quantile_s(0.99) == pytest.approx(0.001, rel=0.01)
    assert omitted.max_s == pytest.approx(1.0, rel=0.02)


def test_a_stall_of_the_load_generator_itself_is_counted_too() -> None:
    """Count in its latency all that keeps a request from being sent when it was due; it shows as lag."""
    tally = Tally(0.0, 1.0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        skipped_s = 0.0

        def clock() -> float:  # jumps half a second ahead, as after a stall
            return loop.time() + skipped_s

        def stall() -> None:
            nonlocal skipped_s
            skipped_s = 0.5

        loop.call_at(0.2, stall)
        server = Server(lambda now_s: now_s + 0.001)
        await Driver(server.send, tally, clock, 0.0).open_loop(iter([k / 100 for k in range(100)]), LoopAlarm(clock))

    event_loop.run(main())
    assert tally.latency.num == 100
    assert 0.48 < tally.latency.max_s < 0.52
    assert tally.lag.max_s == pytest.approx(tally.latency.max_s - 0.001, abs=1e-6)
    assert sum(latency.num for latency, _ in tally.seconds.values()) == 100


@pytest.mark.parametrize(("num_clients", "think_s"), [(1, 0.0), (8, 0.0), (8, 0.05), (3, 0.2)])
def test_closed_loops_keep_the_interactive_law(num_clients: int, think_s: float) -> None:
    """Check N = X (W + Z), but for requests at the edges of the measured time: at most one a client of many hundred."""
    tally = closed_loop(Server(OneByOne(0.01)), num_clients, think_s, Tally(1.0, 31.0))
    per_s = tally.num_answered_within / 30.0
    assert per_s * (tally.latency.mean_s + think_s) == pytest.approx(num_clients, rel=0.01)
    assert per_s == pytest.approx(min(100.0, num_clients / (0.01 + think_s)), rel=0.1)


def test_clients_that_get_no_answer_pause_and_go_on() -> None:
    server = Server(lambda now_s: now_s, outcome="connection refused")
    tally = closed_loop(server, 2, 0.0, Tally(0.0, 1.0))
    assert tally.errors == {"connection refused": tally.num_offered}
    assert 2 * 9 <= len(server.sent_s) <= 2 * 11
    assert tally.latency.num == tally.num_in_time == 0


def test_clients_whose_timer_is_early_begin_with_the_measured_time() -> None:
    server, tally = Server(lambda now_s: now_s + 0.1), Tally(0.0, 1.0)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def slow_clock() -> float:
            return 0.999 * loop.time()

        await Driver(server.send, tally, slow_clock, slow_clock() + 1.0).closed_loop(3, 0.0)

    event_loop.run(main())
    assert tally.num_offered == tally.latency.num == len(server.sent_s) > 3


def test_the_warm_up_is_sent_and_not_counted() -> None:
    server = Server(lambda now_s: now_s + (1.0 if now_s < 2.0 else 0.01))
    tally = open_loop(server, [k / 10 for k in range(100)], Tally(2.0, 5.0))
    assert len(server.sent_s) == 50
    assert tally.num_offered == 30
    assert tally.latency.max_s == pytest.approx(0.01)


def test_goodput_counts_answers_within_the_deadline_and_throughput_those_within_the_time() -> None:
    tally = open_loop(Server(OneByOne(0.02)), [k / 100 for k in range(100)], Tally(0.0, 1.0, deadline_s=0.1005))
    # The queue grows by 10 ms a request: latencies are 20, 30, ... ms.
    assert tally.num_in_time == 9
    assert tally.latency.num == 100
    assert tally.num_answered_within == 49
    assert tally.latency.max_s == pytest.approx(0.02 + 99 * 0.01)


def test_answers_that_are_no_success_are_counted_apart() -> None:
    tally = open_loop(Server(lambda now_s: now_s + 0.01, outcome=503), [0.0, 0.1, 0.2], Tally(0.0, 1.0, 1.0))
    assert (tally.statuses, tally.errors) == ({503: 3}, {})
    assert (tally.latency.num, tally.refused.num, tally.num_in_time) == (0, 3, 0)
    latency, num = tally.seconds[0]
    assert (latency.num, num) == (0, 3)


def test_what_was_due_is_known_by_seconds_and_by_windows() -> None:
    server = Server(lambda now_s: now_s + (0.3 if 1.5 <= now_s < 1.75 else 0.01))
    tally = open_loop(server, [k / 100 + 0.001 for k in range(300)], Tally(0.0, 3.0))
    assert [(second, latency.num) for second, (latency, _) in tally.seconds.items()] == [(0, 100), (1, 100), (2, 100)]
    slow = {begin_s: tally.between(begin_s, begin_s + 1.0).max_s > 0.1 for begin_s in (0.5, 0.75, 1.5, 1.75)}
    assert slow == {0.5: False, 0.75: True, 1.5: True, 1.75: False}
    assert tally.between(1.5, 1.75).num == 25
    assert tally.between(3.0, 4.0).num == 0


def test_tallies_of_two_processes_add_up_to_that_of_one() -> None:
    times_s = list(itertools.takewhile(lambda at: at < 10.0, OpenLoop(50.0).times_s(0)))
    make = partial(Server, lambda now_s: now_s + 0.01 + now_s / 100)
    plan = Plan(Target("127.0.0.1", 80, "/"), OpenLoop(50.0), duration_s=8.0, warm_up_s=1.0, deadline_s=0.05)
    whole = open_loop(make(), times_s, Tally(1.0, 9.0, 0.05))
    together = Tally(1.0, 9.0, 0.05)
    for rank in range(2):
        together.add(pickle.loads(pickle.dumps(open_loop(make(), times_s[rank::2], Tally(1.0, 9.0, 0.05)))))  # noqa: S301
    assert Measured(plan, together, ()).summary() == Measured(plan, whole, ()).summary()
    assert whole.num_in_time < whole.latency.num < len(times_s)


@pytest.mark.parametrize("times_s", [[k / 10 for k in range(100)], [0.0, 1.0, 3600.0]])
def test_a_load_that_is_to_end_early_sends_nothing_after_it_and_waits_for_its_answers(times_s: list[float]) -> None:
    server, tally = Server(lambda now_s: now_s + 0.5), Tally(0.0, 7200.0)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        driver = Driver(server.send, tally, loop.time, loop.time())
        loop.call_later(1.05, driver.end_at, 1.25)
        await driver.open_loop(iter(times_s), LoopAlarm(loop.time))
        return loop.time()

    assert event_loop.run(main()) < 2.0
    due_s = [at for at in times_s if at < 1.25]
    assert server.sent_s == pytest.approx(due_s)
    assert tally.end_s == 1.25
    assert tally.num_offered == tally.latency.num == len(due_s)
