"""Servers on a network that loses, doubles and delays messages and is cut, on machines that crash, in any order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from orchestray.trainers.survey.consensus import shards
from orchestray.trainers.survey.consensus.node import PATIENCE_S
from orchestray.trainers.survey.consensus.shards import Grant, ShardMap
from orchestray.trainers.survey.consensus.trial import Trial, drawn
from support.paxos_mistakes import (
    Mistake,
    counts_votes_of_different_ballots_together,
    forgets_its_promise_in_a_crash,
    forgets_its_votes_in_a_crash,
    has_quorums_of_less_than_a_majority,
    ignores_accepted_values,
    keeps_no_promise,
    takes_promises_after_it_has_resigned,
    takes_the_value_of_the_lowest_ballot,
)
from support.seeds import a_few_and

NUM_SERVERS = (3, 3, 5, 3, 5, 7)
NUM_SHARDS = 3
SCHEDULE_S = 3.0


def schedule(seed: int, patience_s: float | None = None) -> Trial:
    """Return a trial after three seconds of faults."""
    trial = drawn(NUM_SERVERS[seed % len(NUM_SERVERS)], seed, num_shards=NUM_SHARDS, patience_s=patience_s)
    trial.run(SCHEDULE_S)
    return trial


# -- whatever happens --------------------------------------------------------------------------------------------------


@a_few_and(*(range(start, start + 10_000) for start in range(1000, 51_000, 10_000)), few=400)
def test_no_slot_gets_two_values_and_no_shard_two_servers_whatever_fails(seeds: range) -> None:
    decisions = crashes = leaders = 0
    for seed in seeds:
        trial = schedule(seed)
        assert trial.watcher.violations == [], seed
        decisions += len(trial.watcher.decisions)
        crashes += trial.num_crashes
        leaders += len(trial.elected)
    assert min(decisions, crashes, leaders) > 5 * len(seeds)


@a_few_and(range(100, 2100), few=40)
def test_once_faults_end_all_servers_come_to_one_log_and_every_shard_to_one_server(seeds: range) -> None:
    for seed in seeds:
        trial = schedule(seed, PATIENCE_S)
        ended_s = trial.clock.now_s
        trial.heal()
        trial.run(4.0)
        assert trial.decided_since(ended_s) > NUM_SHARDS
        assert [len(trial.serving(shard)) for shard in range(NUM_SHARDS)] == [1] * NUM_SHARDS, seed
        logs = [server.log for server in trial.servers if server is not None]
        known = min(map(len, logs))
        assert len(logs) == len(trial.servers)
        assert max(map(len, logs)) - known <= NUM_SHARDS  # the last ones are under way
        assert all(log[:known] == logs[0][:known] for log in logs)
        assert trial.watcher.violations == []


# -- each rule is needed -----------------------------------------------------------------------------------------------


def forgets_that_clocks_differ(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shards, "CLOCK_SKEW_S", 0.0)


def gives_a_shard_away_before_the_old_grant_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shards, "CLOCK_SKEW_S", -1e9)


def lets_every_decision_hold(patch: pytest.MonkeyPatch) -> None:
    def hold(self: ShardMap, decided: Grant) -> bool:
        self.grants[decided.shard] = decided
        return True

    patch.setattr(ShardMap, "apply", hold)


VALUES, LEARNED, SERVERS = "has two chosen values", "for chosen in slot", "has two servers at"
BROKEN_BY: dict[Mistake, str] = {
    forgets_its_promise_in_a_crash: VALUES,
    forgets_its_votes_in_a_crash: VALUES,
    keeps_no_promise: VALUES,
    ignores_accepted_values: VALUES,
    takes_the_value_of_the_lowest_ballot: VALUES,
    takes_promises_after_it_has_resigned: VALUES,
    has_quorums_of_less_than_a_majority: LEARNED,
    counts_votes_of_different_ballots_together: LEARNED,
    forgets_that_clocks_differ: SERVERS,
    gives_a_shard_away_before_the_old_grant_ends: SERVERS,
    lets_every_decision_hold: "has two servers in epoch",
}


@pytest.mark.parametrize("mistake", BROKEN_BY, ids=lambda mistake: mistake.__name__)
def test_the_schedules_find_each_mistake(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert any(BROKEN_BY[mistake] in violation for violation in violations(range(5000)))


def violations(seeds: Iterable[int]) -> Iterable[str]:
    for seed in seeds:
        yield from schedule(seed).watcher.violations


# -- who serves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_leader", [True, False])
@pytest.mark.parametrize("num_servers", [3, 5, 7])
def test_a_server_that_is_cut_off_stops_serving_before_another_begins(num_servers: int, is_leader: bool) -> None:
    trial = Trial(num_servers, seed=0, num_shards=num_servers)
    trial.run(2.0)
    (leader,) = (number for number, each in enumerate(trial.servers) if each is not None and each.node.leads)
    shard = next(shard for shard in range(num_servers) if (trial.serving(shard) == [leader]) == is_leader)
    (old,) = trial.serving(shard)
    trial.split({old})
    seen = []
    for _ in range(300):
        trial.run(0.01)
        serving = trial.serving(shard)
        assert len(serving) <= 1
        seen += [each for each in serving if each not in seen]
    assert len(seen) == 2
    assert seen[0] == old
    trial.split(set())
    trial.run(1.0)
    assert {server.shards.grants[shard].epoch for server in trial.servers if server is not None} == {2}
    assert trial.watcher.violations == []


def test_a_cluster_that_is_cut_in_half_decides_in_the_larger_part_only() -> None:
    trial = Trial(5, seed=0)
    trial.run(2.0)
    trial.split({0, 1})
    trial.run(3.0)
    known = [len(server.log) for server in trial.servers if server is not None]
    assert max(known[:2]) + 10 < min(known[2:])
    assert trial.watcher.violations == []


def test_the_seed_decides_everything() -> None:
    one, same, other = (drawn(5, seed) for seed in (3, 3, 4))
    for trial in (one, same, other):
        trial.run(SCHEDULE_S)
    assert (one.num_messages, one.watcher.decisions) == (same.num_messages, same.watcher.decisions)
    assert one.watcher.decisions != other.watcher.decisions
