"""The order of samples: each once, by seed and epoch alone; and shares that are as even as can be."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.data.order import EpochPlan, split_rows, window_order, windows
from support.patience import PATIENCE_S

CHUNKS = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@given(chunks=CHUNKS, window_rows=st.integers(1, 200), seed=st.integers(0, 2**70), epoch=st.integers(0, 1000))
def test_an_epoch_holds_each_sample_exactly_once(chunks: list[int], window_rows: int, seed: int, epoch: int) -> None:
    plan = EpochPlan(chunks, window_rows=window_rows, seed=seed, epoch=epoch)
    ids = np.concatenate([plan.sample_ids(window, window.permutation) for window in plan.windows])
    assert sorted(ids.tolist()) == list(range(sum(chunks)))


@given(chunks=CHUNKS, window_rows=st.integers(1, 200), seed=st.integers(0, 9))
def test_windows_follow_each_other_and_hold_no_more_chunks_than_they_need(
    chunks: list[int], window_rows: int, seed: int
) -> None:
    found = list(windows(chunks, window_rows=window_rows, seed=seed, epoch=0))
    assert sorted(chunk for window in found for chunk in window.chunks) == list(range(len(chunks)))
    first = 0
    for number, window in enumerate(found):
        assert (window.index, window.first) == (number, first)
        assert window.num_rows == sum(chunks[chunk] for chunk in window.chunks)
        assert window.num_rows - chunks[window.chunks[-1]] < window_rows  # without the last one it had too few
        assert window.num_rows >= window_rows or window is found[-1]
        first += window.num_rows


@given(chunks=CHUNKS, window_rows=st.integers(1, 99), data=st.data())
def test_windows_between_are_those_that_hold_one_of_the_positions(
    chunks: list[int], window_rows: int, data: st.DataObject
) -> None:
    plan = EpochPlan(chunks, window_rows=window_rows, seed=1, epoch=1)
    start = data.draw(st.integers(0, sum(chunks)))
    stop = data.draw(st.integers(start, sum(chunks)))
    wanted = [w.index for w in plan.windows if set(range(w.first, w.first + w.num_rows)) & set(range(start, stop))]
    assert list(plan.windows_between(start, stop)) == wanted


def test_without_shuffling_the_order_is_the_dataset_s() -> None:
    assert window_order([3, 4, 5], seed=7, epoch=3, shuffle=False).tolist() == list(range(12))


def test_seed_and_epoch_each_change_the_order_and_nothing_else_does() -> None:
    orders = {
        (seed, epoch): tuple(window_order([100], seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)
    }
    assert len(set(orders.values())) == 16
    assert tuple(window_order([100], seed=2, epoch=3)) == orders[2, 3]
    # Numbers that a list of seeds would mix up.
    assert tuple(window_order([100], seed=2**32 + 2, epoch=0)) != tuple(window_order([100], seed=2, epoch=1))


def test_the_order_is_the_same_in_another_process_and_today_as_ever() -> None:
    code = "from orchestray.platform.data.order import window_order as w; print(w([10, 6], seed=3, epoch=2).tolist())"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    here = window_order([10, 6], seed=3, epoch=2).tolist()
    assert elsewhere.stdout.strip() == str(here)
    # A run that a later version resumes must find the order it left.
    assert here == [0, 7, 8, 6, 3, 1, 9, 4, 2, 5, 10, 14, 15, 11, 13, 12]


def test_samples_are_mixed_over_the_whole_of_a_table() -> None:
    order = window_order([10_000], seed=0, epoch=0)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05  # five standard deviations


@given(num_samples=st.integers(0, 10_000), num_shares=st.integers(1, 300))
def test_shares_cover_the_batch_and_differ_by_at_most_one_the_larger_first(num_samples: int, num_shares: int) -> None:
    bounds = split_evenly(num_samples, num_shares)
    assert len(bounds) == num_shares
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == num_samples
    sizes = [stop - start for start, stop in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(num_rows=st.integers(0, 500), fraction=st.floats(0.01, 0.99))
def test_a_split_parts_the_rows_and_leaves_each_part_one(num_rows: int, fraction: float) -> None:
    validation, training = split_rows(num_rows, fraction)
    assert sorted([*validation.tolist(), *training.tolist()]) == list(range(num_rows))
    if num_rows > 1:
        assert min(len(validation), len(training)) >= 1
        assert len(validation) == pytest.approx(num_rows * fraction, abs=1)
