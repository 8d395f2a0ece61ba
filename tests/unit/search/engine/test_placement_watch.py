"""The report of a search that waits for places."""

from __future__ import annotations

from orchestray.search.engine.placement_watch import PlacementWatch

PATIENCE_S = 25.0


class Search:
    """The state of a search, in a time of its own."""

    def __init__(self) -> None:
        self.now_s, self.num_said = 100.0, 0
        self.scarcity = PlacementWatch(self._say, patience_s=PATIENCE_S, clock=lambda: self.now_s)

    def _say(self) -> None:
        self.num_said += 1

    def passes(self, seconds: int, *, is_under_way: bool = False, has_place: bool = False) -> int:
        """Pass `seconds` turns of a second each; return the number of reports in all."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.scarcity.look(is_under_way=is_under_way, has_place=lambda: has_place)
        return self.num_said


def test_a_search_without_a_place_says_so_when_its_patience_is_over_and_not_again() -> None:
    search = Search()
    assert search.passes(25) == 0
    assert search.passes(1) == 1
    assert search.passes(1000) == 1


def test_a_search_whose_trials_are_under_way_or_whose_processes_start_slowly_says_nothing() -> None:
    search = Search()
    assert search.passes(100, has_place=True) == 0
    assert search.passes(100, is_under_way=True) == 0
    assert search.passes(25) == 0


def test_it_says_so_anew_where_it_has_had_places_meanwhile() -> None:
    search = Search()
    assert search.passes(26) == 1
    assert search.passes(1, is_under_way=True) == 1
    assert search.passes(25) == 1
    assert search.passes(1) == 2
