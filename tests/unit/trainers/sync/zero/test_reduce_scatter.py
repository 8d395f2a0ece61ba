"""Sums and gathers of parts that differ in size: by sending them, and by the operations of the backend, as on GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.sync.zero.reduce_scatter import AllGather, ReduceScatter, Regions
from support.threads import run_replicas

SIZES = [4, 2, 3]


@pytest.mark.parametrize("is_native", [False, True])
def test_each_rank_gets_the_sum_of_its_part_and_all_get_all_sums(
    monkeypatch: pytest.MonkeyPatch, *, is_native: bool
) -> None:
    monkeypatch.setattr(Collective, "has_native_scatter", is_native)
    regions = Regions(SIZES)

    def member(collective: Collective) -> tuple[Tensor, Tensor]:
        rank = collective.rank
        addends, out = torch.arange(float(regions.numel)) * (rank + 1), torch.zeros(SIZES[rank])
        ReduceScatter(collective, regions, addends, out, lambda numel, like: like.new_empty(numel)).wait()
        gathered = torch.full((regions.numel,), -1.0)
        regions.of(gathered, rank).copy_(out)
        AllGather(collective, regions, gathered).wait()
        return out, torch.cat([regions.of(gathered, each) for each in range(len(SIZES))])

    sums = torch.arange(float(regions.numel)) * sum(range(1, len(SIZES) + 1))
    wanted = [regions.of(sums, rank) for rank in range(len(SIZES))]
    for rank, (own, all_of_them) in enumerate(run_replicas(len(SIZES), member)):
        assert torch.equal(own, wanted[rank])
        assert torch.equal(all_of_them, torch.cat(wanted))


def test_only_nccl_has_operations_of_its_own() -> None:
    assert run_replicas(2, lambda collective: collective.has_native_scatter) == [False, False]
