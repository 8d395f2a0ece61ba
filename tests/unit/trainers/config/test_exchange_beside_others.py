"""Demands of an exchange on the other sections of a config, and combinations that are allowed."""

from __future__ import annotations

import pytest

from orchestray.trainers.config.load import load_train_config
from support.configs import GOOD, averaging, gossip, problems_of, server


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
            [
                server("shards: 1, transport: shared_memory, consistency: asynchronous"),
                "train.optimizer={type: soap, lr: 1}",
            ],
            (
                "train.optimizer.type: soap keeps its state to itself, and workers on shared memory share theirs; "
                "use transport: channel, or another optimizer"
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
        *(
            (
                [
                    *("strategy.network.tensor=2", "strategy.network.pipeline=2"),
                    *("strategy.network.schedule=pipedream", f"train.optimizer={{type: {kind}, lr: 0.1}}"),
                ],
                (
                    f"train.optimizer.type: {kind} looks at whole parameters, which the workers of a tensor group hold "
                    "parts of; use adamw"
                ),
            )
            for kind in ("lars", "lamb", "muon", "soap")
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
        [server("consistency: asynchronous, groups: 2, compute_groups: true, lr_scale: inverse_staleness")],
        [server("consistency: asynchronous, softsync: 2, shards: 2, lr_scale: inverse_staleness, persist: true")],
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
