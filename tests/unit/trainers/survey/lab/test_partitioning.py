"""Partitions of a fully connected layer: all compute the same, and each sends what its formula says."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.partitioning import WORKERS, partitions
from orchestray.trainers.survey.matmul import cannon_bytes

FLOAT_BYTES = 4


@pytest.fixture(scope="module")
def exhibit() -> Exhibit:
    return partitions()


def cell(exhibit: Exhibit, partition: str, workers: int, column: str) -> Any:
    (row,) = (row for row in exhibit.rows if row[:2] == [partition, workers])
    return row[list(exhibit.columns).index(column)]


def test_each_partition_computes_the_outputs_of_one_worker(exhibit: Exhibit) -> None:
    assert len(exhibit.rows) == 4 * len(WORKERS)
    assert all(row[-1] < 1e-4 for row in exhibit.rows)


@pytest.mark.parametrize("workers", WORKERS)
def test_neurons_on_two_workers_take_half_the_messages_for_twice_the_products(exhibit: Exhibit, workers: int) -> None:
    once, twice = "each neuron on one worker", "each neuron on two workers"
    assert cell(exhibit, once, workers, "messages") == workers * (workers - 1)
    assert cell(exhibit, twice, workers, "messages") == workers * -(-(workers - 2) // 2)
    assert [cell(exhibit, name, workers, "products") for name in (once, twice)] == [1, 2]
    assert cell(exhibit, twice, workers, "bytes a worker") < cell(exhibit, once, workers, "bytes a worker")


@pytest.mark.parametrize("workers", WORKERS)
def test_cannon_s_workers_send_two_blocks_a_shift_and_hold_two_of_each_matrix(exhibit: Exhibit, workers: int) -> None:
    torus, gathered = "Cannon's torus", "rows and columns gathered"
    side, block_bytes = round(workers**0.5), FLOAT_BYTES * 72 * 72 // workers
    sent = max(cannon_bytes(block_bytes, block_bytes, side, rank) for rank in range(workers))
    assert cell(exhibit, torus, workers, "bytes a worker") == sent == 2 * side * block_bytes
    assert cell(exhibit, gathered, workers, "bytes a worker") == 2 * (side - 1) * block_bytes
    held = [cell(exhibit, name, workers, "numbers held") for name in (torus, gathered)]
    assert held == [4 * block_bytes // FLOAT_BYTES, 2 * side * block_bytes // FLOAT_BYTES]
    assert cell(exhibit, torus, workers, "products") == 1
