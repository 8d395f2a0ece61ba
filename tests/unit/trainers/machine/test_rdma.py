"""A machine's devices for remote memory access are those that Linux lists."""

from __future__ import annotations

from pathlib import Path

from orchestray.trainers.machine.rdma import rdma_devices


def test_devices_are_those_that_linux_lists_and_none_where_it_lists_none(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path / "infiniband") == []
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert rdma_devices(tmp_path) == ["mlx5_0", "mlx5_1"]
    assert rdma_devices() == rdma_devices(Path("/sys/class/infiniband"))
