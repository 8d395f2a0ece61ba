from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.platform.errors import StorageError
from orchestray.platform.run.metrics import EventLog, MetricsLog, read_lines, read_metrics, read_tail

LINES = [{"step": step, "time_s": step / 8, "loss": 1.0 / step, "note": "a\nb"} for step in range(1, 6)]


def write(path: Path, lines: list[dict[str, object]]) -> None:
    with MetricsLog(path) as log:
        log.append(lines)


def test_lines_come_back_in_order_and_nothing_is_written_before_flush(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(LINES)
    assert read_lines(path) == []
    log.flush()
    assert read_lines(path) == LINES
    log.close()
    log.close()
    with pytest.raises(StorageError, match="closed"):
        log.flush()


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(min_value=0, max_value=200), rest=st.binary(max_size=12))
def test_a_file_cut_anywhere_reads_as_its_whole_lines_and_goes_on_after_them(
    tmp_path_factory: pytest.TempPathFactory, cut: int, rest: bytes
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    write(path, LINES)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    num_whole = whole[:cut].count(b"\n")
    assert read_lines(path) == LINES[:num_whole]
    # A power cut may also leave garbage where the last line should be.
    path.write_bytes(whole[:cut] + rest.replace(b"\n", b"\0"))
    write(path, [{"step": 99}])
    assert read_lines(path) == [*LINES[:num_whole], {"step": 99}]


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, LINES)
    with path.open("ab") as file:
        file.write(b'{"step": 6, "text": "' + b"x" * 300_000)
    write(path, [{"step": 6}])
    assert read_lines(path) == [*LINES, {"step": 6}]


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\nrubbish\n{"step":3}\n')
    with pytest.raises(StorageError, match=r"metrics\.jsonl: line 2 is not a JSON object"):
        read_lines(path)


def test_truncating_drops_exactly_the_later_steps_and_the_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(LINES)
        log.append([{"step": 3, "split": "validation", "loss": 0.5}, {"step": 5, "split": "validation", "loss": 0.4}])
        assert log.truncate_after(3) == 3
        assert log.last_time_s() == LINES[2]["time_s"]
        log.append([{"step": 4}])
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 3, 4]
    assert list(tmp_path.iterdir()) == [path]


def test_truncating_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(LINES)
        log.flush()
        with path.open("ab") as file:  # what another writer, killed, left
            file.write(b'{"step": 2')
        log.truncate_after(4)
    assert read_lines(path) == LINES[:4]


def test_the_table_has_every_key_of_any_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        [
            {"step": 1, "loss": 2},
            {"step": 2, "loss": float("nan"), "split": "validation"},
            {"step": 3, "loss": 0.5, "mixed": 1},
            {"step": 4, "mixed": "text"},
        ],
    )
    table = read_metrics(path)
    assert table.to_pydict() == {
        "step": [1, 2, 3, 4],
        "loss": [2.0, None, 0.5, None],
        "split": [None, "validation", None, None],
        "mixed": [None, None, "1", "text"],
    }
    assert read_metrics(tmp_path / "none.jsonl").num_rows == 0


def test_keys_of_objects_are_columns_of_their_own_whatever_types_their_values_have(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    values: list[Any] = ["off", True, 2**63, [1, {"a": 0}], None]
    write(path, [{"config": {"lr": 0.5, "mixed": {"value": value}}} for value in values] + [{"trial": 5}])
    configs = read_metrics(path).to_pydict()["config"]
    assert [config and config["lr"] for config in configs] == [0.5] * 5 + [None]
    texts = ["off", "true", "9223372036854775808", '[1, {"a": 0}]', None]
    assert [config["mixed"]["value"] for config in configs[:5]] == texts


def test_the_tail_of_a_long_log_is_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": step} for step in range(1, 1001)])
    assert [line["step"] for line in read_tail(path, 100)] == [994, 995, 996, 997, 998, 999, 1000]
    assert len(read_tail(path)) == 1000
    assert read_tail(tmp_path / "none.jsonl") == []


def test_an_event_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    ticks = itertools.count(1)
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: float(next(ticks)))
    log.append("started", workers=2)
    log.append("worker_lost", role="worker", rank=1)
    assert read_lines(log.path) == [
        {"event": "started", "time_s": 1.0, "role": None, "rank": None, "workers": 2},
        {"event": "worker_lost", "time_s": 2.0, "role": "worker", "rank": 1},
    ]
    log.close()


def test_a_full_disk_is_a_clear_error() -> None:
    log = MetricsLog(Path("/dev/full"))
    log.append(LINES)
    with pytest.raises(StorageError, match="could not write /dev/full: the disk is full"):
        log.flush()
    log.close()
