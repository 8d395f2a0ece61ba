"""Measurements of several members give times of every kind, size and number of ranks, at rank 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.machine import measure_group
from orchestray.trainers.machine.measure_group import channel_times, collective_times, contention, overlap
from orchestray.trainers.machine.transfers import KINDS, Curve
from support.threads import run_replicas

SIZES_BYTES = (1 << 10, 1 << 14)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_group, "SIZES_BYTES", SIZES_BYTES)
    monkeypatch.setattr(measure_group, "_POINTS", tuple((size, 2) for size in SIZES_BYTES))
    monkeypatch.setattr(measure_group, "_BLOCK_S", 0.01)


def test_every_kind_is_timed_with_every_number_of_ranks_and_known_at_rank_0() -> None:
    first, *others = run_replicas(4, lambda world: collective_times(world, (2, 4)))
    assert {kind: {*by_ranks} for kind, by_ranks in first.curves.items()} == {kind: {2, 4} for kind in KINDS}
    assert all(curve.sizes_bytes == SIZES_BYTES for by_ranks in first.curves.values() for curve in by_ranks.values())
    assert others == [None, None, None]


def test_more_bytes_do_not_take_less_time_and_times_that_say_so_give_way_together() -> None:
    first, _ = run_replicas(2, lambda world: collective_times(world, (2,)))
    for by_ranks in first.curves.values():
        assert by_ranks[2].times_s[0] <= by_ranks[2].times_s[1]
    assert measure_group._rising([3.0, 1.0]) == (2.0, 2.0)
    assert measure_group._rising([1.0, 3.0]) == (1.0, 3.0)


def test_one_process_alone_is_not_slowed_down_and_more_are_not_sped_up() -> None:
    first, second = run_replicas(2, lambda world: contention(world, (1, 2)))
    assert second is None
    for factors in (first.products, first.copies):
        assert {*factors} == {1, 2}
        assert factors[1] == 1.0
        assert factors[2] >= 1.0


def test_the_hidden_part_is_a_part() -> None:
    def hidden(world: Collective) -> float:
        return overlap(world, repeats=2)

    assert all(0 <= part <= 1 for part in run_replicas(2, hidden))


def test_both_channels_are_timed_in_every_size() -> None:
    """Time messages over real sockets, and through real memory; there is no channel over RDMA."""
    curves, _ = run_replicas(2, channel_times)
    assert {name: curve.sizes_bytes for name, curve in curves.items()} == {
        "tcp": SIZES_BYTES,
        "shared_memory": SIZES_BYTES,
    }
    assert all(min(curve.times_s) > 0 for curve in curves.values())
    assert curves["tcp"].times_s != curves["shared_memory"].times_s


@pytest.mark.parametrize("rank", [0, 1])
def test_the_latency_and_the_seconds_a_byte_of_a_channel_are_found_from_its_messages(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha_s, beta_s_per_byte, now_s = 3e-5, 2e-9, [0.0]

    class Known:
        """A channel whose messages take a known time, by a clock that they turn."""

        def send(self, tensor: torch.Tensor) -> None:
            now_s[0] += alpha_s + beta_s_per_byte * tensor.nbytes

        def recv(self, into: torch.Tensor) -> None:
            self.send(into)

    monkeypatch.setattr(measure_group, "perf_counter", lambda: now_s[0])
    channel: Any = Known()
    sizes = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
    fit = Curve(sizes, tuple(measure_group._half_s(channel, rank, size, 5) for size in sizes)).fit
    assert (fit.alpha_s, fit.beta_s_per_byte) == pytest.approx((alpha_s, beta_s_per_byte), rel=1e-6)
