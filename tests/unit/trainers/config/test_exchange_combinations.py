"""Messages to a user whose keys of an exchange do not go together: exact texts, one mistake one line."""

from __future__ import annotations

import pytest

from support.configs import GOOD, averaging, gossip, problems_of, server


@pytest.mark.parametrize(
    ("data", "exchange", "line"),
    [
        # staleness
        (
            2,
            server("consistency: stale"),
            (
                "staleness: is required with consistency: stale, and missing: the steps the fastest worker may be "
                "ahead, such as 2"
            ),
        ),
        (
            2,
            server("staleness: 2"),
            (
                "staleness: bounds how far a worker may be ahead, which consistency: synchronous does not; "
                "use consistency: stale, or take it out"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, staleness: 0"),
            (
                "staleness: bounds how far a worker may be ahead, which consistency: asynchronous does not; "
                "use consistency: stale, or take it out"
            ),
        ),
        # backup workers
        (
            4,
            server("backup_workers: 4"),
            (
                "backup_workers: must be fewer than strategy.network.data (4), of which they are a part, got 4; "
                "at most 3 would fit"
            ),
        ),
        (
            1,
            server("backup_workers: 1"),
            (
                "backup_workers: must be fewer than strategy.network.data (1), of which they are a part, got 1; "
                "raise it, or use backup_workers: 0"
            ),
        ),
        (
            4,
            server("pulls: changed, consistency: asynchronous, fetch_every: 2"),
            "pulls: the worker moves its own parameters in between; use fetch_every: 1, or pulls: whole",
        ),
        (
            4,
            server("consistency: asynchronous, backup_workers: 1"),
            (
                "backup_workers: repeat the work of the slowest, for whom asynchronous workers do not wait; "
                "use backup_workers: 0"
            ),
        ),
        # shares by speed
        (
            4,
            server("consistency: asynchronous, balance: speed"),
            (
                "balance: speed is for workers that wait for each other; asynchronous ones take as many shares as "
                "they can; use balance: even"
            ),
        ),
        (
            4,
            server("backup_workers: 1, balance: speed"),
            (
                "backup_workers: with balance: speed nobody is left to be waited for, and who repeats a share tells "
                "nothing of a speed; use backup_workers: 0, or balance: even"
            ),
        ),
        (
            4,
            server("groups: 2, balance: speed"),
            (
                "balance: speed needs to know how long each worker takes, and a leaf server answers for its workers "
                "together; use balance: even, or groups: 1"
            ),
        ),
        # what only asynchronous workers can do
        (
            2,
            server("push_every: 2"),
            (
                "push_every: a worker would hold back a part of the step that the others wait for with consistency: "
                "synchronous; use push_every: 1, or consistency: asynchronous"
            ),
        ),
        (
            2,
            server("consistency: stale, staleness: 1, fetch_every: 2"),
            (
                "fetch_every: a worker would compute with parameters older than the step allows with consistency: "
                "stale; use fetch_every: 1, or consistency: asynchronous"
            ),
        ),
        (
            2,
            server("overlap: true"),
            (
                "overlap: a worker would compute with parameters older than the step allows with consistency: "
                "synchronous; use overlap: false, or consistency: asynchronous"
            ),
        ),
        (
            2,
            server("lr_scale: inverse_staleness"),
            (
                "lr_scale: scales updates by their staleness, and synchronous ones have none; use lr_scale: none, or "
                "consistency: stale or asynchronous"
            ),
        ),
        # rates
        (
            2,
            server("global_lr: 0.5"),
            (
                "global_lr: is the servers' own rate, and with rates: coupled there is one rate; "
                "use rates: decoupled, or take it out"
            ),
        ),
        (
            2,
            server("rates: decoupled"),
            (
                "rates: decoupled is for workers of which some are ahead, got consistency: synchronous; use "
                "consistency: stale or asynchronous, or rates: coupled"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, rates: decoupled, push_every: 2"),
            "fetch_every: with rates: decoupled a push ends a round; use fetch_every: 2, or rates: coupled",
        ),
        (
            2,
            server("consistency: stale, staleness: 1, rates: decoupled, balance: speed"),
            (
                "balance: with rates: decoupled the mean of a round is of shares of one size; use balance: even, or "
                "rates: coupled"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, rates: decoupled, groups: 2"),
            "groups: with rates: decoupled one server sees the steps of all workers; use groups: 1, or rates: coupled",
        ),
        # softsync
        (
            4,
            server("consistency: asynchronous, softsync: 3"),
            (
                "softsync: divides strategy.network.data (4) into the gradients of an update, got 3; use one of its "
                "divisors"
            ),
        ),
        (
            2,
            server("softsync: 1"),
            (
                "consistency: with softsync: 1 no worker waits for an update; use consistency: asynchronous, or take "
                "softsync out"
            ),
        ),
        # compute groups
        (
            2,
            server("groups: 2, compute_groups: true"),
            (
                "consistency: with compute_groups: true groups do not wait for each other; use consistency: "
                "asynchronous, or compute_groups: false"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, groups: 2, compute_groups: true, overlap: true"),
            (
                "overlap: with compute_groups: true a group's workers compute with the same weights; use overlap: "
                "false, or compute_groups: false"
            ),
        ),
        # shared memory
        (
            2,
            server("transport: shared_memory"),
            (
                "transport: is for workers that never wait (HOGWILD), got consistency: synchronous; use consistency: "
                "asynchronous, or transport: channel"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, transport: shared_memory, shards: 2"),
            "shards: with transport: shared_memory there is one memory; use shards: 1, or transport: channel",
        ),
        (
            2,
            server("consistency: asynchronous, transport: shared_memory, replicas: 2"),
            "replicas: with transport: shared_memory there is one memory; use replicas: 1, or transport: channel",
        ),
        (
            2,
            server("consistency: asynchronous, transport: shared_memory, groups: 2"),
            (
                "groups: with transport: shared_memory no server stands between the workers and the memory; use "
                "groups: 1, or transport: channel"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, transport: shared_memory, persist: true"),
            (
                "persist: with transport: shared_memory updates are never acknowledged, so none can be on disk before "
                "it is; use persist: false, or transport: channel"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, transport: shared_memory, fetch_every: 2"),
            (
                "fetch_every: with transport: shared_memory each share changes the memory at once, and reads what is "
                "there; use fetch_every: 1, or transport: channel"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, transport: shared_memory, overlap: true"),
            (
                "overlap: with transport: shared_memory each share changes the memory at once, and reads what is "
                "there; use overlap: false, or transport: channel"
            ),
        ),
        # factors
        (
            2,
            server("groups: 2, factors: auto"),
            "factors: leaf servers send sums of gradients; use groups: 1, or factors: never",
        ),
        (
            2,
            server("consistency: asynchronous, push_every: 2, factors: always"),
            "factors: factors of several shares do not add up; use push_every: 1, or factors: never",
        ),
        (
            2,
            server("consistency: asynchronous, transport: shared_memory, factors: auto"),
            "factors: no server would multiply them; use transport: channel, or factors: never",
        ),
        (
            2,
            server("consistency: asynchronous, overlap: true, factors: auto"),
            ("factors: inputs and errors are those of the share just computed; use overlap: false, or factors: never"),
        ),
        # leaf servers
        (
            2,
            server("groups: 3"),
            (
                "groups: each leaf server needs a worker of its own, and strategy.network.data is 2, got 3; "
                "at most 2 would fit"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, significance: 0.01"),
            (
                "significance: holds back what need not cross to other groups, and with groups: 1 there are none; "
                "raise groups"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, groups: 2, significance_decay: sqrt"),
            (
                "significance_decay: has significance fall, and with significance: 0 every change is sent; "
                "raise it, or take this out"
            ),
        ),
        (
            2,
            server("groups: 2, significance: 0.01"),
            (
                "significance: lets the groups' parameters differ, which consistency: synchronous does not allow; "
                "use consistency: asynchronous, or significance: 0"
            ),
        ),
        # graphs
        (
            4,
            gossip("peers: 4"),
            (
                "peers: must be fewer than strategy.network.data (4), of which a replica is one itself, got 4; "
                "at most 3 would fit"
            ),
        ),
        (
            4,
            gossip("graph: complete, peers: 3"),
            (
                "peers: says how many others a replica draws on the random graph; on this graph its neighbours are "
                "given, so take it out"
            ),
        ),
        (
            4,
            gossip("graph: {edges: [[0, 1], [1, 2], [2, 4], [2, 3]]}"),
            "graph.edges.2: the replicas are 0 to 3 (strategy.network.data: 4), got [2, 4]",
        ),
        (
            3,
            gossip("graph: {edges: [[0, 1], [1, 1], [1, 2]]}"),
            "graph.edges.1: joins a replica to itself, got [1, 1]; each keeps a part of its own parameters anyway",
        ),
        (
            3,
            gossip("graph: {edges: [[0, 1], [1, 2], [1, 0]]}"),
            "graph.edges.2: is there twice, got [1, 0]; an edge goes both ways",
        ),
        (
            4,
            gossip("graph: {edges: [[2, 3], [0, 1]]}"),
            "graph.edges: must connect all 4 replicas, and nothing leads from 0 to 2; add [0, 2]",
        ),
        (
            2,
            gossip("graph: {edges: []}"),
            "graph.edges: must connect all 2 replicas, and nothing leads from 0 to 1; add [0, 1]",
        ),
        # meetings
        (
            2,
            averaging("every: 4"),
            (
                "every: the replicas would never meet in a run of 3 steps (train.steps), got 4; at most 3 would "
                "fit, or end"
            ),
        ),
        (
            2,
            "strategy.exchange={type: elastic_averaging, every: 4}",
            "every: the replicas would never meet in a run of 3 steps (train.steps), got 4; at most 3 would fit",
        ),
        (
            2,
            "strategy.exchange={type: parameter_server, consistency: asynchronous, push_every: 7}",
            ("push_every: the run has 3 steps (train.steps), so no worker would take enough shares for a push, got 7"),
        ),
        (
            2,
            averaging("every: end, outer_optimizer: {type: sgd, lr: 1}"),
            (
                "outer_optimizer: takes a step at each meeting, and with every: end there is none; "
                "give every a number of steps"
            ),
        ),
        (
            2,
            averaging("every: 2, outer_optimizer: {type: sgd, lr: 1, nesterov: true}"),
            "outer_optimizer.nesterov: needs a momentum: without one there is nothing to look ahead by",
        ),
        (
            2,
            averaging("every: 2, outer_optimizer: {type: yellowfin, groups: [{match: '*.bias', weight_decay: 0.1}]}"),
            "outer_optimizer.groups: yellowfin tunes by the whole move; take them out, or use sgd",
        ),
        (
            6,
            "strategy.exchange={type: elastic_averaging, alpha: 0.2}",
            (
                "alpha: the centre overshoots where alpha times strategy.network.data (6) is more than 1, got 0.2; "
                "at most 0.1666 would fit"
            ),
        ),
        # all-reduces
        (
            2,
            "strategy.exchange={algorithm: ring, shard: gradients}",
            (
                "algorithm: ring sums whole gradients, and shard: gradients spreads them over the replicas; "
                "use algorithm: native, or shard: none"
            ),
        ),
        (
            2,
            "strategy.exchange={factors: auto, shard: optimizer}",
            (
                "factors: each replica makes whole gradients of the factors, which shard: optimizer would spread; "
                "use factors: never, or shard: none"
            ),
        ),
        (
            2,
            "strategy.exchange={factors: always, algorithm: tree}",
            (
                "factors: factors are gathered, not summed, so tree has no part in them; "
                "use factors: never, or algorithm: native"
            ),
        ),
        (
            2,
            "strategy.exchange={store_shards: 2}",
            (
                "store_shards: the store is for what factors leave, and none are sent; "
                "use factors: auto, or store_shards: 0"
            ),
        ),
        (
            2,
            "strategy.exchange={factors: auto, store_shards: 3}",
            (
                "store_shards: each replica hosts one shard at most, and data: 2 has fewer than 3; "
                "lower store_shards, or raise strategy.network.data"
            ),
        ),
    ],
)
def test_keys_that_do_not_go_together_give_one_line(data: int, exchange: str, line: str) -> None:
    assert problems_of(GOOD, f"strategy.network.data={data}", exchange) == [f"config: strategy.exchange.{line}"]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_an_outer_optimizer_that_measures_the_whole_move_is_refused_where_workers_hold_parts(
    tensor: int, pipeline: int
) -> None:
    layout = f"strategy.network={{data: 2, tensor: {tensor}, pipeline: {pipeline}}}"
    yellowfin = averaging("every: 2, outer_optimizer: {type: yellowfin}")
    (problem,) = problems_of(GOOD, layout, yellowfin)
    assert problem == (
        "config: strategy.exchange.outer_optimizer.type: yellowfin measures the norm of the whole move, of which each "
        f"worker has a part with tensor: {tensor} and pipeline: {pipeline}; use sgd, or 1 for both"
    )
