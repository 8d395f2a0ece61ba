"""The map of the shards, and what a leader proposes for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestray.trainers.survey.consensus.shards import CLOCK_SKEW_S, LEASE_S, Grant, ShardMap

FIRST = Grant(shard=0, server=2, epoch=1, start_s=1.0, until_s=2.0)
NEXT = Grant(shard=0, server=1, epoch=2, start_s=2.0 + CLOCK_SKEW_S, until_s=3.0)


@pytest.fixture
def shards() -> ShardMap:
    shards = ShardMap(1)
    assert shards.apply(FIRST)
    return shards


def test_a_server_serves_from_the_start_of_its_grant_until_its_end_and_no_other_does(shards: ShardMap) -> None:
    assert [shards.serves(2, 0, now_s) for now_s in (0.99, 1.0, 1.99, 2.0)] == [False, True, True, False]
    assert not shards.serves(1, 0, 1.5)


def test_a_renewal_holds_for_the_same_server_only(shards: ShardMap) -> None:
    assert not shards.apply(replace(FIRST, server=1, until_s=9.0))
    assert shards.apply(replace(FIRST, until_s=2.5))
    assert not shards.apply(replace(FIRST, until_s=2.2))
    assert shards.grants[0].until_s == 2.5


def test_another_server_follows_when_no_clock_is_within_the_old_grant_any_more(shards: ShardMap) -> None:
    assert not shards.apply(replace(NEXT, start_s=NEXT.start_s - 0.001))
    assert not shards.apply(replace(NEXT, epoch=3))
    assert shards.apply(NEXT)
    assert not shards.apply(FIRST)


def test_a_grant_that_a_renewal_has_overtaken_is_void(shards: ShardMap) -> None:
    assert shards.apply(replace(FIRST, until_s=2.4))
    assert not shards.apply(NEXT)
    assert shards.grants[0].server == 2


def decided(num_shards: int, alive: list[int], now_s: float) -> ShardMap:
    shards = ShardMap(num_shards)
    for grant in shards.due(alive, (), now_s):
        assert shards.apply(grant)
    return shards


def test_shards_go_evenly_to_the_servers_and_those_of_a_lost_one_evenly_to_the_others() -> None:
    shards = decided(6, [0, 1, 2], 1.0)
    assert sorted(grant.server for grant in shards.grants.values()) == [0, 0, 1, 1, 2, 2]
    for grant in shards.due([0, 2], (), 1.1):
        assert grant.epoch == 2
        assert grant.start_s == 1.0 + LEASE_S + CLOCK_SKEW_S
        assert shards.apply(grant)
    assert sorted(grant.server for grant in shards.grants.values()) == [0, 0, 0, 2, 2, 2]


def test_a_grant_is_renewed_when_half_of_it_is_left_and_not_while_one_is_under_way() -> None:
    shards = decided(2, [0, 1], 1.0)
    assert shards.due([0, 1], (), 1.0 + 0.49 * LEASE_S) == []
    now_s = 1.0 + 0.51 * LEASE_S
    assert [(each.shard, each.epoch, each.until_s) for each in shards.due([0, 1], {0}, now_s)] == [
        (1, 1, now_s + LEASE_S)
    ]
