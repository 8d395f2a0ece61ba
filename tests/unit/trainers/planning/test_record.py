"""The record keeps predictions beside what runs took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestray.trainers.planning.record import Entry, Record, append, load_record, measured_start_s, measured_step_s


def entry(ratio: float, family: str = "zero", machine: str = "here") -> Entry:
    return Entry(family, "run", 0.01, 0.01 * ratio, "2026-01-01T00:00:00+00:00", machine)


def test_an_error_is_counted_as_it_was_before_the_run_was_known() -> None:
    record = Record([entry(2.0)] * 6)
    errors = record.errors("zero")
    assert errors[0] == pytest.approx(-0.5)  # the first had nothing to be corrected by
    for number, error in enumerate(errors):
        factor = Record(record.entries[:number]).correction(record.entries[0].traits).factor
        assert error == pytest.approx(factor / 2 - 1)
    assert record.errors("single") == []


def test_a_record_is_read_as_it_was_written_for_one_machine(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "record.jsonl"
    for written in (entry(1.0), entry(2.0, machine="there"), entry(3.0)):
        append(written, file)
    with file.open("a", encoding="utf-8") as handle:
        handle.write('{"family": "zero"}\n{"fam')  # of another version, and cut off by a full disk
    assert load_record("here", file).entries == [entry(1.0), entry(3.0)]
    assert load_record("here", tmp_path / "nowhere").entries == []


def lines(gaps_s: list[float]) -> list[dict[str, Any]]:
    at_s = 0.0
    found: list[dict[str, Any]] = [{"step": 0, "time_s": 0.0, "samples_per_s": 1.0}]
    for step, gap_s in enumerate(gaps_s, start=1):
        at_s += gap_s
        found.append({"step": step, "time_s": at_s, "samples_per_s": 1.0})
    return found


@pytest.mark.parametrize(
    "line",
    [
        b'{"family": "fam', b"\xff\xfe", b"3", b"[]", b'{"family": "single"}',
        b'{"family": "f", "name": "n", "predicted_s": "1", "measured_s": 1, "at": "", "machine": "here"}',
        b'{"family": "f", "name": "n", "predicted_s": 1, "measured_s": null, "at": "", "machine": "here"}',
        b'{"family": "f", "name": "n", "predicted_s": NaN, "measured_s": 1, "at": "", "machine": "here"}',
    ],
)  # fmt: skip
def test_a_broken_line_costs_the_record_no_other(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    good = Entry("single", "run", 1.0, 2.0, "", "here")
    append(good, file)
    file.write_bytes(file.read_bytes() + line + b"\n")
    append(good, file)
    assert load_record("here", file).entries == [good, good]


def test_the_first_steps_and_pauses_do_not_count_as_steps() -> None:
    gaps_s = [5.0] * 10 + ([0.1] * 99 + [30.0]) * 2
    assert measured_step_s(lines(gaps_s)) == pytest.approx(0.1)
    validation = [{"time_s": 0.0, "accuracy": 0.5}]
    assert measured_step_s([*lines(gaps_s), *validation]) == pytest.approx(0.1)


def test_regular_slow_steps_count_as_steps() -> None:
    gaps_s = [0.1] * 10 + ([0.1] * 9 + [1.0]) * 20
    assert measured_step_s(lines(gaps_s)) == pytest.approx(0.19)


def test_exchanges_count_however_seldom_they_are_and_pauses_beside_them_do_not() -> None:
    gaps_s = [0.1] * 10 + ([0.1] * 89 + [2.0] + [0.1] * 9 + [30.0]) * 3
    assert measured_step_s(lines(gaps_s), every=100) == pytest.approx((98 * 0.1 + 2.0) / 99)
    assert measured_step_s(lines(gaps_s)) == pytest.approx(0.1)
    assert measured_step_s(lines(gaps_s), every=1) == pytest.approx(0.1)
    made = lines(gaps_s)
    validated = [*made[:100], {"step": 99, "time_s": 0.0, "split": "validation"}, *made[100:]]
    assert measured_step_s(validated, every=100) == pytest.approx((98 * 0.1 * 3 + 2 * 2.0) / (3 * 99 - 1))


def test_a_run_of_few_steps_has_no_measured_step() -> None:
    assert measured_step_s(lines([0.1] * 20)) is None
    assert measured_step_s([]) is None


def test_a_start_is_what_runs_of_as_many_processes_took() -> None:
    entries = [
        replace(entry(1.0), processes=count, start_s=start_s)
        for count, start_s in ((1, 3.0), (1, 5.0), (3, 9.0), (2, 0.0))
    ]
    record = Record(entries)
    assert [record.start_s(count) for count in (1, 3)] == [4.0, 9.0]
    assert record.start_s(2) == 5.0  # nobody knows: the median of all
    assert Record().start_s(1) == 0.0


def test_the_first_step_begins_when_the_start_ends() -> None:
    first = {"step": 1, "time_s": 4.5, "samples_per_s": 1.0}
    assert measured_start_s([{"event": "started", "time_s": 1.0}, first], 0.5) == 4.0
    assert measured_start_s([{**first, "step": 7}], 0.5) == 0.0  # resumed
