"""A quick measurement of a machine has fewer shapes and numbers of processes, and all else that a whole one has."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestray.platform.comm.thread_group import in_threads
from orchestray.trainers.machine import measure, measure_compute, measure_group


@pytest.mark.parametrize(("quick", "sizes", "ranks"), [(False, (1, 4, 8), {2, 4}), (True, (1, 8), {2})])
def test_a_quick_measurement_has_fewer_shapes_and_numbers_of_processes(
    quick: bool, sizes: tuple[int, ...], ranks: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "SIZES", (1, 4, 8))
    monkeypatch.setattr(measure, "QUICK_SIZES", (1, 8))
    small = {"SIZES_BYTES": (1 << 10, 1 << 14), "_POINTS": ((1 << 10, 2), (1 << 14, 2)), "_BLOCK_S": 0.01}
    for name, value in {**small, "_PRODUCT": 32, "_COPIED": 1 << 12, "_OVERLAPPED_BYTES": 1 << 14}.items():
        monkeypatch.setattr(measure_group, name, value)
    for name in ("_FILE_BYTES", "_COPIED_BYTES"):
        monkeypatch.setattr(measure_compute, name, 1 << 20)
    meeting = str(tmp_path / "meeting")
    profile, *others = in_threads(4, lambda rank: measure.measure(rank, 4, meeting, tmp_path, 7, quick=quick))
    assert others == [None] * 3
    assert profile is not None
    assert profile.process_bytes == 7
    assert {table.sizes for one in profile.compute.values() for table in one.gemm.values()} == {sizes}
    assert {frozenset(curves) for curves in profile.collectives.curves.values()} == {frozenset(ranks)}
