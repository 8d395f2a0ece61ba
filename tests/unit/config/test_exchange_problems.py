"""What a user reads when the replicas cannot agree as a config asks: exact texts, one mistake one line."""

from __future__ import annotations

import pytest

from orchestray.platform.config.load import load_train_config
from support.configs import GOOD, problems_of


def server(keys: str) -> str:
    return f"strategy.exchange={{type: parameter_server, {keys}}}"


def gossip(keys: str) -> str:
    return f"strategy.exchange={{type: gossip, {keys}}}"


def averaging(keys: str) -> str:
    return f"strategy.exchange={{type: averaging, {keys}}}"


@pytest.mark.parametrize(
    ("exchange", "line"),
    [
        # types and keys
        (
            "strategy.exchange={type: gosip}",
            (
                "type: must be one of allreduce, parameter_server, gossip, averaging, elastic_averaging, independent, "
                "got 'gosip'; did you mean 'gossip'?"
            ),
        ),
        (
            "strategy.exchange=ring",
            (
                "must be a mapping with a type (allreduce, parameter_server, gossip, averaging, elastic_averaging, "
                "independent), got 'ring'"
            ),
        ),
        ("strategy.exchange.staleness=3", "staleness: is no key of allreduce; parameter_server has it"),
        ("strategy.exchange.every=3", "every: is no key of allreduce; averaging, elastic_averaging have it"),
        ("strategy.exchange.overlapp=true", "overlapp: is no known key; did you mean 'overlap'?"),
        (gossip("peer: 1"), "peer: is no known key; did you mean 'peers'?"),
        ("strategy.exchange.algorithm=rign", None),
        # one of several forms
        ("strategy.exchange.type=averaging", "every: is required, and missing"),
        (averaging("every: End"), "every: must be a whole number or end, got 'End'; did you mean 'end'?"),
        (averaging("every: 0"), "every: must be >= 1 or end, got 0"),
        (averaging("every: 1.5"), "every: must be a whole number or end, got 1.5"),
        (averaging("every: '2'"), "every: must be a whole number or end, got '2' (take it out of its quotes)"),
        (
            averaging("every: 2, outer_optimizer: {type: sdg}"),
            (
                "outer_optimizer.type: must be one of sgd, adagrad, rmsprop, adam, adamw, lars, yellowfin, got 'sdg'; "
                "did you mean 'sgd'?"
            ),
        ),
        (
            averaging("every: 2, outer_optimizer: {lr: 1}"),
            (
                "outer_optimizer.type: is required, and missing; there are sgd, adagrad, rmsprop, adam, adamw, lars, "
                "yellowfin"
            ),
        ),
        (averaging("every: 2, outer_optimizer: {type: sgd}"), "outer_optimizer.lr: is required, and missing"),
        (
            averaging("every: 2, outer_optimizer: {type: sgd, lr: 1, betas: [0, 0]}"),
            "outer_optimizer.betas: is no key of sgd; adam, adamw have it",
        ),
        (
            gossip("graph: rign"),
            "graph: must be one of random, ring, complete or a mapping with edges, got 'rign'; did you mean 'ring'?",
        ),
        (gossip("graph: 3"), "graph: must be one of random, ring, complete or a mapping with edges, got 3"),
        (
            gossip("graph: [[0, 1]]"),
            "graph: must be one of random, ring, complete or a mapping with edges, got [[0, 1]]",
        ),
        (gossip("graph: {edges: [[0]]}"), "graph.edges.0: must be a list of 2, got [0]"),
        (gossip("graph: {edges: [[0, 1], [0, 1, 2]]}"), "graph.edges.1: must be a list of 2, got [0, 1, 2]"),
        (gossip("graph: {edges: [[0, -1]]}"), "graph.edges.0.1: must be >= 0, got -1"),
        (gossip("graph: {edges: [0]}"), "graph.edges.0: must be a list, got 0"),
        (gossip("graph: {edges: 3}"), "graph.edges: must be a list, got 3"),
        (gossip("graph: {edgs: [[0, 1]]}"), "graph.edgs: is no known key; did you mean 'edges'?"),
        (gossip("graph: {edges: [[0, 1]], x: 1}"), "graph.x: is no known key; known here: edges"),
    ],
)
def test_a_key_that_is_wrong_by_itself_gives_one_line(exchange: str, line: str | None) -> None:
    line = line or (
        "algorithm: must be one of native, tree, butterfly, ring, rabenseifner, auto, got 'rign'; did you mean 'ring'?"
    )
    path = "strategy.exchange" if line.startswith("must") else "strategy.exchange."
    separator = ": " if line.startswith("must") else ""
    assert problems_of(GOOD, "strategy.network.data=4", exchange) == [f"config: {path}{separator}{line}"]


_NONE_TO_TALK_TO = "is between replicas, and with data: 1 there is one replica; raise strategy.network.data"


@pytest.mark.parametrize(
    ("exchange", "line"),
    [
        ("strategy.exchange.type=gossip", f"gossip {_NONE_TO_TALK_TO}"),
        (averaging("every: 2"), f"averaging {_NONE_TO_TALK_TO}"),
        ("strategy.exchange.type=elastic_averaging", f"elastic_averaging {_NONE_TO_TALK_TO}"),
        (
            "strategy.exchange.type=independent",
            (
                "independent is between replicas, and with data: 1 an ensemble of one is a plain run; "
                "raise strategy.network.data"
            ),
        ),
    ],
)
def test_one_replica_has_nobody_to_agree_with(exchange: str, line: str) -> None:
    assert problems_of(GOOD, exchange) == [f"config: strategy.exchange.type: {line}"]


@pytest.mark.parametrize(
    "exchange",
    ["strategy.exchange.type=parameter_server", server("consistency: asynchronous, overlap: true"), "train.seed=1"],
)
def test_one_worker_may_have_a_server_or_nobody(exchange: str) -> None:
    assert load_train_config(GOOD, [exchange]).strategy.network.data == 1


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
                "rates: decoupled is for workers that never wait, got consistency: synchronous; use consistency: "
                "asynchronous, or rates: coupled"
            ),
        ),
        (
            2,
            server("consistency: asynchronous, rates: decoupled, push_every: 2"),
            "fetch_every: with rates: decoupled a push ends a round; use fetch_every: 2, or rates: coupled",
        ),
        (
            2,
            server("consistency: asynchronous, rates: decoupled, groups: 2"),
            "groups: with rates: decoupled one server sees the steps of all workers; use groups: 1, or rates: coupled",
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
    ],
)
def test_keys_that_do_not_go_together_give_one_line(data: int, exchange: str, line: str) -> None:
    assert problems_of(GOOD, f"strategy.network.data={data}", exchange) == [f"config: strategy.exchange.{line}"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            [server("shards: 2"), "train.grad_clip=1.0"],
            (
                "train.grad_clip: needs the norm of a step's whole gradient, and with shards: 2 nobody sees it; "
                "use shards: 1, or take grad_clip out"
            ),
        ),
        (
            [server("shards: 3"), "train.optimizer={type: lars, lr: 1}"],
            (
                "train.optimizer.type: lars needs the norms of whole layers, which shards: 3 cut anywhere; "
                "use strategy.exchange.shards: 1, or sgd"
            ),
        ),
        (
            [server("consistency: stale, staleness: 2"), "strategy.network.tensor=2"],
            (
                "strategy.exchange.shards: each of the 2 workers of a replica (strategy.network: tensor x pipeline) "
                "has as many servers of its own; use a multiple of 2, got 1"
            ),
        ),
        (
            [
                server("shards: 2"),
                "strategy.network.tensor=2",
                "train.optimizer.type=lars",
            ],
            (
                "train.optimizer.type: lars needs the norms of whole layers, and the servers of each worker of a "
                "tensor group have parts of them; use strategy.network.tensor: 1, or sgd"
            ),
        ),
        (
            [server("shards: 3"), "strategy.network.pipeline=2"],
            (
                "strategy.exchange.shards: each of the 2 workers of a replica (strategy.network: tensor x pipeline) "
                "has as many servers of its own; use a multiple of 2, got 3"
            ),
        ),
        (
            [server("shards: 2, consistency: asynchronous, push_every: 2"), "strategy.network.pipeline=2"],
            (
                "strategy.exchange.push_every: the workers of a replica push each share together; "
                "use push_every: 1, or in strategy.network tensor: 1 and pipeline: 1"
            ),
        ),
        (
            [server("shards: 2, groups: 2"), "strategy.network.pipeline=2"],
            (
                "strategy.exchange.groups: leaf servers hold whole networks; "
                "use groups: 1, or in strategy.network tensor: 1 and pipeline: 1"
            ),
        ),
        (
            [server("shards: 2"), "strategy.network.pipeline=2", "train.grad_clip=1.0"],
            (
                "train.grad_clip: needs the norm of a step's whole gradient, and stages push theirs to servers of "
                "their own; take it out, or use consistency: asynchronous, where each server clips its own part"
            ),
        ),
        (
            ["strategy.exchange.type=gossip", "strategy.network.pipeline=2", "strategy.network.schedule=pipedream"],
            (
                "strategy.exchange.type: pipedream's stages update after each micro-batch, each at a moment of its "
                "own; use allreduce, or another schedule with gossip"
            ),
        ),
        (
            ["strategy.exchange.algorithm=ring", "strategy.network.pipeline=2", "strategy.network.schedule=pipedream"],
            (
                "strategy.exchange.algorithm: pipedream's stages update after each micro-batch, each at a moment of "
                "its own; use algorithm: native, or another schedule"
            ),
        ),
        (
            ["strategy.exchange.factors=auto", "strategy.network.pipeline=2", "strategy.network.schedule=pipedream"],
            (
                "strategy.exchange.factors: pipedream's stages update after each micro-batch, each at a moment of its "
                "own; use factors: never, or another schedule"
            ),
        ),
        (
            [server("balance: speed"), "strategy.aggregation={type: median, byzantine: 0}"],
            (
                "strategy.exchange.balance: speed gives workers shares of different sizes, which median would compare "
                "as if they were alike; use balance: even, or aggregation: mean"
            ),
        ),
        (
            [server("consistency: asynchronous"), "engine=ray_train"],
            "engine: ray_train runs allreduce, averaging and gossip; use engine: actors for parameter_server",
        ),
    ],
)
def test_what_an_exchange_needs_of_other_sections_is_said(overrides: list[str], line: str) -> None:
    assert problems_of(GOOD, "strategy.network.data=2", *overrides) == [f"config: {line}"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy.exchange.algorithm=rabenseifner"],
        ["strategy.exchange.factors=auto"],
        [server("consistency: stale, staleness: 0, backup_workers: 3, lr_scale: inverse_staleness")],
        [server("shards: 4, replicas: 2, groups: 4, persist: true")],
        [server("consistency: stale, staleness: 4, balance: speed, shards: 2, replicas: 2, persist: true")],
        [server("shards: 2, consistency: asynchronous, push_every: 3, fetch_every: 2"), "train.grad_clip=1.0"],
        [server("consistency: asynchronous, groups: 2, significance: 0.01, overlap: true")],
        [server("consistency: asynchronous, transport: shared_memory")],
        [server("consistency: asynchronous, rates: decoupled, global_lr: 0.5, push_every: 2, fetch_every: 2")],
        [server("shards: 1"), "train.optimizer={type: lars, lr: 1}", "train.grad_clip=1.0"],
        [gossip("peers: 3, mixing: push_sum")],
        [gossip("graph: ring, mixing: push_sum")],
        [gossip("graph: {edges: [[3, 1], [1, 2], [0, 2]]}")],
        [averaging("every: 3"), "engine=ray_train"],
        [averaging("every: end")],
        [averaging("every: 1000"), "train.steps=null", "train.epochs=1"],
        [averaging("every: 2, outer_optimizer: {type: sgd, lr: 0.7, momentum: 0.9, nesterov: true}")],
        ["strategy.exchange={type: elastic_averaging, alpha: 0.25, consistency: asynchronous}"],
        ["strategy.exchange={type: elastic_averaging, alpha: 0.0}"],
        ["strategy.exchange={type: independent, average: probabilities, trunk: 1}"],
    ],
)
def test_what_does_go_together_is_let_through(overrides: list[str]) -> None:
    assert load_train_config(GOOD, ["strategy.network.data=4", *overrides]).strategy.network.data == 4


def test_a_graph_of_a_thousand_replicas_is_looked_through_at_once() -> None:
    chain = [[rank, rank + 1] for rank in range(999)]
    config = {**GOOD, "strategy": {"exchange": {"type": "gossip", "graph": {"edges": chain}}}}
    assert load_train_config(config, ["strategy.network.data=1000"]).strategy.network.data == 1000
    broken = {**GOOD, "strategy": {"exchange": {"type": "gossip", "graph": {"edges": chain[:500] + chain[501:]}}}}
    assert problems_of(broken, "strategy.network.data=1000") == [
        (
            "config: strategy.exchange.graph.edges: must connect all 1000 replicas, and nothing leads from 0 to 501; "
            "add [0, 501]"
        )
    ]
