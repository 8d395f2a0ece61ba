"""Numbers and curves as text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from orchestray.platform.terminal.format import duration, metrics_text, number, result_rows, short_path, size
from orchestray.platform.terminal.plot import plot


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (41230, "41,230"),
        (41230.4, "41,230"),
        (0.03123456, "0.03123"),
        (1.5e-7, "1.5e-07"),
        (2e15, "2e+15"),
        (float("nan"), "nan"),
        (True, "True"),
        ("x", "x"),
    ],
)
def test_numbers_have_four_digits(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.84, "0.8 s"), (9.96, "10 s"), (59.6, "1:00 min"), (187, "3:07 min"), (7380, "2:03 h")],
)
def test_durations_have_two_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "-"), (812, "812 B"), (999_600, "1 MB"), (3_400_000, "3.4 MB"), (1.2e9, "1.2 GB"), (5e15, "5e+03 TB")],
)
def test_sizes_have_a_unit(num_bytes: float | None, text: str) -> None:
    assert size(num_bytes) == text


def test_the_loss_is_the_last_of_the_metrics() -> None:
    assert metrics_text({"step": 3, "split": "validation", "loss": 0.5, "accuracy": 0.25}) == "accuracy 0.25  loss 0.5"


def test_a_result_shows_what_it_has_and_nothing_else() -> None:
    assert result_rows({"status": "failed", "steps": 0, "final": None, "bytes": None, "error": "why"}) == [
        ("steps", "0"),
        ("error", "why"),
    ]


def test_a_run_that_was_predicted_shows_what_its_steps_took_beside_the_prediction() -> None:
    noted = {"step_s": 0.012599, "interval_s": [0.010651, 1.4], "measured_step_s": 0.015129}
    assert result_rows({"predicted": noted}) == [("step", "15.1 ms  (predicted 12.6 ms, 10.7 to 1,400)")]
    assert result_rows({"predicted": None}) == []


def test_a_compressed_run_shows_its_bytes_and_the_metrics_before_and_after() -> None:
    stages = {"whole": {"accuracy": 0.98, "loss": 0.1}, "coded": {"accuracy": 0.975, "loss": 0.125}}
    counts = {"bytes_before": 26_000, "bytes": 1000, "weights": 6032, "weights_left": 603, "bits": 4}
    assert result_rows({"steps": 9, "compressed": {"run": "digits", **counts, "validation": stages}}) == [
        ("steps", "9"),
        ("made from", "digits"),
        ("compressed", "26,000 -> 1,000 bytes, 26.0 x smaller"),
        ("weights", "603 of 6,032 left, in 4 bits"),
        ("whole", "accuracy 0.98  loss 0.1"),
        ("coded", "accuracy 0.975  loss 0.125"),
    ]
    no_validation = {"run": "digits", **counts, "validation": {"whole": None, "coded": None}}
    assert result_rows({"compressed": no_validation})[-1][0] == "weights"


def test_a_path_below_the_working_directory_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "runs" / "digits") == "runs/digits"
    assert short_path(tmp_path.parent / "runs") == str(tmp_path.parent / "runs")
    monkeypatch.chdir("/")
    assert short_path(tmp_path / "runs") == str(tmp_path / "runs")


def dots(line: str) -> list[bool]:
    """Return for each column of a line of the curve True if it has a dot."""
    return [ord(character) > 0x2800 for character in line.partition("│")[2]]


def test_a_falling_curve_begins_at_the_top_and_ends_at_the_bottom_without_holes() -> None:
    lines = plot(range(1, 1001), [math.exp(-step / 200) for step in range(1, 1001)], width=40, height=6)
    assert lines[0].startswith("0.9") or lines[0].lstrip().startswith("0.9")
    assert dots(lines[0])[0]
    assert dots(lines[5])[39]
    assert all(any(column) for column in zip(*map(dots, lines[:6]), strict=True))
    assert lines[-1].split() == ["1", "1,000"]
    assert len({len(line) for line in lines}) == 1


def test_few_points_are_joined() -> None:
    lines = plot([1, 2, 3], [1.0, 2.0, 1.0], width=20, height=4)
    assert all(any(column) for column in zip(*map(dots, lines[:4]), strict=True))


def test_a_constant_curve_is_a_line() -> None:
    lines = plot([1, 2], [3.0, 3.0], width=10, height=3)
    assert [any(dots(line)) for line in lines[:3]] == [False, False, True]


@pytest.mark.parametrize("values", [[], [1.0], [None, 2.0, float("nan")]])
def test_fewer_than_two_values_draw_nothing(values: list[float | None]) -> None:
    assert plot(range(len(values)), values) == []
