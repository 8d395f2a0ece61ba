"""Measurements of one process give whole tables, and what takes long is not measured but grows like its work."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from orchestray.trainers.machine import measure_compute
from orchestray.trainers.machine.gemm import shapes
from orchestray.trainers.machine.measure_compute import computing, disk_bytes_per_s, gemm_table, reference_s


def test_a_table_has_a_time_for_each_shape_and_a_thousand_times_the_work_takes_longer() -> None:
    table = gemm_table(torch.float32, (2, 32, 256), passes=1)
    assert len(table.times_s) == 27
    assert table.seconds(256, 256, 256) > table.seconds(2, 2, 2)


def test_products_that_would_take_long_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_compute, "_MOST_S", 0.0)
    asked = []

    def product_s(m: int, n: int, k: int, _: object) -> float:
        asked.append((m, n, k))
        return 1e-6

    monkeypatch.setattr(measure_compute, "product_s", product_s)
    sizes = (1, 100, 1000)
    table = gemm_table(torch.float32, sizes)
    assert {*asked} == {(1, 1, 1)}
    assert table.times_s == pytest.approx([1e-6 * math.prod(shape) for shape in shapes(sizes)])


def test_the_number_of_threads_is_left_as_it_was_and_each_speed_is_above_zero() -> None:
    before = torch.get_num_threads()
    found = computing(2, sizes=(1, 16))
    reference_s()
    assert torch.get_num_threads() == before
    assert {*found.gemm} == {"float32", "bfloat16"}
    assert min(found.copy_bytes_per_s, found.small_op_s) > 0


def test_the_disk_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_compute, "_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(measure_compute, "_FILE_CHUNK_BYTES", 1 << 18)
    assert disk_bytes_per_s(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []
