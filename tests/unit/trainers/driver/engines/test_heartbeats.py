"""The workers of Ray Train that are silent, stuck or waiting, by their heartbeats."""

from __future__ import annotations

from orchestray.platform.actors.slot import Patience
from orchestray.platform.process.pulse import Sign
from orchestray.trainers.driver.engines.heartbeats import Beat, Heartbeats

AT_WORK = Sign(quiet_s=0.0, is_waiting=False, share_s=0.1)


class Heard:
    """Two workers that have entered, and a clock that is set by hand."""

    def __init__(self, patience: Patience) -> None:
        self.now_s = 100.0
        self.heartbeats = Heartbeats(2, patience, lambda: self.now_s)
        self.heartbeats.begin()
        self._numbers = {0: 0, 1: 0}
        self._beats: dict[int, Beat] = {}
        for rank in (0, 1):
            self.heartbeats.enter(rank)

    def after(self, seconds: float, signs: dict[int, Sign | None], *, is_built: bool = True) -> dict[int, str]:
        """Let time pass in which these workers beat, and return who is in trouble."""
        for _ in range(round(10 * seconds)):
            self.now_s += 0.1
            for rank, sign in signs.items():
                self._numbers[rank] += 1
                self._beats[rank] = Beat(self._numbers[rank], is_built, sign)
            self.heartbeats.hear(self._beats)
        return self.heartbeats.troubles()

    def kinds(self) -> list[str | None]:
        return [None if state is None else state.kind for state in self.heartbeats.states(self.now_s)]


def test_a_worker_without_heartbeats_for_the_time_allowed_is_in_trouble_and_no_other_is() -> None:
    heard = Heard(Patience(hang_s=6.0))
    heard.after(1.0, {0: AT_WORK, 1: AT_WORK})
    assert heard.after(5.8, {0: AT_WORK}) == {}
    assert heard.kinds() == ["working", "silent"]
    assert heard.after(0.4, {0: AT_WORK}) == {1: "it did not answer for 6 s: it was stopped, or starved"}
    heard.heartbeats.leave(1)
    assert heard.after(10.0, {0: AT_WORK}) == {}
    assert heard.kinds() == ["working", None]


def test_a_worker_that_is_still_building_has_five_times_as_long() -> None:
    heard = Heard(Patience(hang_s=6.0))
    heard.after(0.1, {0: None, 1: None}, is_built=False)
    assert heard.kinds() == ["building", "building"]
    assert heard.after(29.0, {0: None}, is_built=False) == {}
    assert list(heard.after(1.2, {0: None}, is_built=False)) == [1]


def test_time_in_which_nobody_could_be_heard_is_no_silence() -> None:
    heard = Heard(Patience(hang_s=6.0))
    heard.after(1.0, {0: AT_WORK, 1: AT_WORK})
    heard.now_s += 3600.0  # the driver was held up
    assert heard.after(0.1, {}) == {}
    assert list(heard.after(5.2, {})) == [0, 1]


def test_a_worker_that_beats_without_progress_and_waits_for_nobody_is_stuck() -> None:
    heard = Heard(Patience(stall_s=5.0))
    waits = Sign(quiet_s=9.0, is_waiting=True, share_s=0.1)
    assert heard.after(0.1, {0: waits, 1: Sign(4.9, is_waiting=False, share_s=0.1)}) == {}
    assert heard.after(0.1, {0: waits, 1: Sign(9.0, is_waiting=False, share_s=1.0)}) == {}, "ten shares take longer"
    stuck = {0: waits, 1: Sign(9.0, is_waiting=False, share_s=0.1)}
    assert heard.after(0.1, stuck) == {1: "it made no progress for 9 s, and waited for no other process"}
    assert not heard.heartbeats.is_newly_deadlocked()


def test_workers_that_all_wait_are_deadlocked_once_in_an_attempt() -> None:
    heard = Heard(Patience(stall_s=5.0))
    waits = Sign(quiet_s=9.0, is_waiting=True, share_s=0.1)
    assert heard.after(0.1, {0: waits, 1: Sign(0.1, is_waiting=True, share_s=0.1)}) == {}
    assert not heard.heartbeats.is_newly_deadlocked(), "the other has just begun to wait"
    assert heard.after(0.1, {0: waits, 1: waits}) == {}
    assert heard.heartbeats.is_newly_deadlocked()
    assert not heard.heartbeats.is_newly_deadlocked()
    heard.heartbeats.begin()
    for rank in (0, 1):
        heard.heartbeats.enter(rank)
    heard.after(0.1, {0: waits, 1: waits})
    assert heard.heartbeats.is_newly_deadlocked()
