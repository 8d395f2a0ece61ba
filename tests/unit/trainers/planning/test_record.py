"""The record of errors corrects predictions, and its intervals hold as often as they say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from orchestray.trainers.planning.record import Entry, Record, append, load_record, measured_step_s


def entry(ratio: float, family: str = "zero", machine: str = "here") -> Entry:
    return Entry(family, "run", 0.01, 0.01 * ratio, "2026-01-01T00:00:00+00:00", machine)


def test_without_runs_nothing_is_corrected_and_no_interval_is_claimed() -> None:
    found = Record([entry(2.0)] * 4).correction("zero")
    assert (found.factor, found.interval) == (1.0, None)


def test_a_family_is_corrected_by_the_median_of_its_own_errors() -> None:
    record = Record([entry(1.1)] * 5 + [entry(1.3)] * 6 + [entry(9.0, "single")] * 50)
    found = record.correction("zero")
    assert (found.factor, found.of_family, found.num_runs) == (1.3, True, 11)


def test_a_family_with_few_runs_is_corrected_by_those_of_all() -> None:
    found = Record([entry(1.5, "single")] * 20 + [entry(0.1)]).correction("zero")
    assert (found.factor, found.of_family) == (1.5, False)


@pytest.mark.parametrize("num_runs", [10, 50, 400])
def test_the_interval_covers_four_fifths_of_further_runs(num_runs: int) -> None:
    dice, covered, trials = random.Random(0), 0, 4000
    for _ in range(trials):
        record = Record([entry(dice.lognormvariate(0.2, 0.1)) for _ in range(num_runs)])
        found = record.correction("zero")
        assert found.interval is not None
        low, high = found.interval
        covered += low <= dice.lognormvariate(0.2, 0.1) / found.factor <= high
    assert 0.75 <= covered / trials <= 0.85


def test_an_error_is_counted_as_it_was_before_the_run_was_known() -> None:
    record = Record([entry(2.0)] * 6)
    # The first five had nothing to be corrected by.
    assert record.errors("zero") == pytest.approx([-0.5] * 5 + [0.0])
    assert record.errors("single") == []


def test_a_record_is_read_as_it_was_written_for_one_machine(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "record.jsonl"
    for written in (entry(1.0), entry(2.0, machine="there"), entry(3.0)):
        append(written, file)
    with file.open("a", encoding="utf-8") as handle:
        handle.write('{"family": "zero"}\n{"fam')  # of another version, and cut off by a full disk
    assert load_record("here", file).entries == [entry(1.0), entry(3.0)]
    assert load_record("here", tmp_path / "nowhere").entries == []


def lines(gaps_s: list[float]) -> list[dict[str, float]]:
    at_s, found = 0.0, [{"time_s": 0.0, "samples_per_s": 1.0}]
    for gap_s in gaps_s:
        at_s += gap_s
        found.append({"time_s": at_s, "samples_per_s": 1.0})
    return found


def test_the_first_steps_and_pauses_do_not_count_as_steps() -> None:
    gaps_s = [5.0] * 10 + ([0.1] * 99 + [30.0]) * 2
    assert measured_step_s(lines(gaps_s)) == pytest.approx(0.1)
    validation = [{"time_s": 0.0, "accuracy": 0.5}]
    assert measured_step_s([*lines(gaps_s), *validation]) == pytest.approx(0.1)


def test_regular_slow_steps_count_as_steps() -> None:
    gaps_s = [0.1] * 10 + ([0.1] * 9 + [1.0]) * 20
    assert measured_step_s(lines(gaps_s)) == pytest.approx(0.19)


def test_a_run_of_few_steps_has_no_measured_step() -> None:
    assert measured_step_s(lines([0.1] * 20)) is None
    assert measured_step_s([]) is None
