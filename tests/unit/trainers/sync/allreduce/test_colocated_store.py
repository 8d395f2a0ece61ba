"""A key-value store whose shards the replicas host: its sums, its bytes, and a shard that is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.trainers.sync.allreduce.colocated_store import ColocatedStore
from orchestray.trainers.sync.allreduce.sufficient_factors import Factored
from support.threads import run_replicas


def values_of(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(("size", "shards", "count"), [(2, 1, 7), (3, 3, 10), (4, 3, 11), (3, 3, 2), (2, 2, 0)])
def test_every_replica_pulls_the_sum_in_rank_order(size: int, shards: int, count: int) -> None:
    def run(collective: Collective) -> Tensor:
        store, values = ColocatedStore(collective, shards), values_of(collective.rank, count)
        store.pull(store.push(values), values)
        return values

    expected = values_of(0, count)
    for rank in range(1, size):
        expected += values_of(rank, count)
    assert all(torch.equal(found, expected) for found in run_replicas(size, run))


def test_a_push_reaches_the_shard_that_owns_its_part_and_no_other() -> None:
    def run(collective: Collective) -> list[float]:
        return ColocatedStore(collective, 2).push(torch.tensor([1.0, 10.0, 100.0]) * (collective.rank + 1)).tolist()

    assert run_replicas(3, run) == [[6, 60], [600], []]


@pytest.mark.parametrize(("size", "shards"), [(4, 1), (4, 3), (4, 4)])
def test_what_one_replica_sends_and_the_bytes_beyond_are_what_all_send(size: int, shards: int) -> None:
    def run(collective: Collective) -> tuple[int, int, int]:
        exchange, model = Factored(store_shards=shards), nn.Conv1d(3, 3, 5)
        exchange.attach(model, collective)
        exchange.before_step(1)
        model(torch.ones(1, 3, 5)).sum().backward()
        before = collective.own_bytes_sent
        exchange.finish([])
        return collective.own_bytes_sent - before, exchange.bytes_beyond, exchange.bytes_saved

    found = run_replicas(size, run)
    assert [size * sent + beyond for sent, beyond, _ in found] == [sum(sent for sent, _, _ in found)] * size
    assert [saved for *_, saved in found] == [0] * size
    assert len({sent for sent, _, _ in found}) == (1 if shards == size else 2)


def test_a_shard_that_dies_between_push_and_pull_is_a_lost_peer_to_all_others() -> None:
    def run(collective: Collective) -> str:
        store, values = ColocatedStore(collective, 2), values_of(collective.rank, 10)
        total = store.push(values)
        if collective.rank == 1:
            collective.abort()
            return "died"
        with pytest.raises(PeerLostError, match="lost a peer"):
            store.pull(total, values)
        collective.abort()  # as a worker does, so that no other waits for it
        return "lost a peer"

    assert run_replicas(3, run) == ["lost a peer", "died", "lost a peer"]


def test_fewer_replicas_than_shards_are_refused_by_the_store_and_host_one_each_of_an_exchange() -> None:
    def run(collective: Collective) -> int:
        with pytest.raises(ValueError, match="Expected 1 to 2 shards among 2 replicas: 3"):
            ColocatedStore(collective, 3)
        exchange = Factored(store_shards=3)
        exchange.attach(nn.Linear(2, 2), collective)
        assert exchange._store is not None
        return exchange._store.num_shards

    assert run_replicas(2, run) == [2, 2]
