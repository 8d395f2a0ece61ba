"""Messages to a user whose replicas cannot agree as the config asks: exact texts, one mistake one line."""

from __future__ import annotations

import pytest

from orchestray.trainers.config.load import load_train_config
from support.configs import GOOD, averaging, gossip, problems_of, server


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
                "outer_optimizer.type: must be one of sgd, adagrad, rmsprop, adam, adamw, lars, lamb, kfac, "
                "natural_gradient, muon, soap, yellowfin, got 'sdg'; "
                "did you mean 'sgd'?"
            ),
        ),
        (
            averaging("every: 2, outer_optimizer: {lr: 1}"),
            (
                "outer_optimizer.type: is required, and missing; there are sgd, adagrad, rmsprop, adam, adamw, lars, "
                "lamb, kfac, natural_gradient, muon, soap, yellowfin"
            ),
        ),
        (averaging("every: 2, outer_optimizer: {type: sgd}"), "outer_optimizer.lr: is required, and missing"),
        (
            averaging("every: 2, outer_optimizer: {type: sgd, lr: 1, betas: [0, 0]}"),
            "outer_optimizer.betas: is no key of sgd; adam, adamw, lamb, muon, soap have it",
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
