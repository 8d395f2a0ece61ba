"""Schemes under which K-FAC would not be that of one process are refused."""

from __future__ import annotations

import pytest

from support.configs import GOOD, averaging, gossip, problems_of, server

KFAC = "train.optimizer={type: kfac, lr: 0.1}"


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (
            [server("consistency: stale, staleness: 2")],
            "train.optimizer.type: kfac measures a batch at the weights of one step, and with consistency: stale",
        ),
        (
            [server("shards: 2")],
            "train.optimizer.kl_clip: needs the length of a step of all layers, and several servers each make",
        ),
        (
            [server("shards: 2"), "strategy.network.pipeline=2"],
            "train.optimizer.kl_clip: needs the length of a step of all layers, and several servers each make",
        ),
        (
            [server("shards: 2, groups: 2"), "train.optimizer.kl_clip=null"],
            "train.optimizer.type: leaf servers add up what workers measure for kfac, and send it to one server",
        ),
        (
            [server("shards: 2"), "strategy.network.tensor=2", "train.optimizer.kl_clip=null"],
            "train.optimizer.type: kfac moves whole layers, and the servers of each worker of a tensor group",
        ),
        (
            [server("shards: 1"), "train.optimizer.statistics_workers=1"],
            "train.optimizer.statistics_workers: chooses among replicas, and workers of parameter servers take shares",
        ),
        (
            [server("shards: 1"), "strategy.compression.type=onebit"],
            "train.optimizer.type: kfac has no state for one replica alone",
        ),
        ([gossip("peers: 1")], "train.optimizer.type: kfac needs the whole batch's curvature at every step"),
        (
            ["strategy.network.data=1", "strategy.network.pipeline=2", "strategy.network.schedule=pipedream"],
            "train.optimizer.type: kfac measures a whole batch, and pipedream's stages update after each micro-batch",
        ),
        (["strategy.compression.type=onebit"], "train.optimizer.type: kfac has no state for one replica alone"),
        (
            ["strategy.network.data=3", "strategy.aggregation.type=median"],
            "train.optimizer.type: kfac takes the mean of all replicas' curvature",
        ),
        (
            ["train.optimizer.groups=[{match: '*', damping: 1.0}]"],
            "train.optimizer.groups.0.damping: kfac has one for all parameters",
        ),
        (
            ["train.optimizer={type: natural_gradient, lr: 0.1}", gossip("peers: 1")],
            "train.optimizer.type: natural_gradient is for replicas that share each batch, or average",
        ),
        (["train.weight_norm=true"], "train.weight_norm: kfac moves a layer's weights by each other, as they are"),
        (["train.quantize={type: twn}"], "train.quantize: kfac moves a layer's weights by each other, as they are"),
        (["train.optimizer.statistics_workers=3"], "train.optimizer.statistics_workers: there are 2 replicas"),
        (
            ["train.optimizer.statistics_every_steps=4"],
            "train.optimizer: inverse_every_steps must be a multiple of statistics_every_steps (4), got 10",
        ),
        (
            [
                "train.optimizer={type: sgd, lr: 0.1}",
                averaging("every: 2, outer_optimizer: {type: kfac, lr: 1.0}"),
            ],
            "strategy.exchange.outer_optimizer.type: kfac looks at the layers while they compute",
        ),
    ],
)
def test_what_kfac_cannot_hold_is_refused_with_a_sentence(overrides: list[str], start: str) -> None:
    (problem,) = problems_of(GOOD, "strategy.network.data=2", KFAC, *overrides)
    assert problem.removeprefix("config: ").startswith(start)
