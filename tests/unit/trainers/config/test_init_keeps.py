"""Messages to a user whose layout or scheme cannot keep zeros or shared values."""

from __future__ import annotations

import pytest

from orchestray.trainers.config.load import load_train_config
from support.configs import GOOD, gossip, problems_of

_KEPT = ("train.init_from=runs/a", "train.init_keeps=values")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("train.init_from=null",), "keeps what the weights of train.init_from have; name them, or take it out"),
        (
            ("strategy.network.tensor=2",),
            ("needs whole weights on each worker; use strategy.network.data alone, got tensor: 2 and pipeline: 1"),
        ),
        (
            ("train.optimizer={type: muon, lr: 0.1}",),
            "muon moves a layer's weights by each other; take this out, or another optimizer",
        ),
        (
            ("train.optimizer={type: soap, lr: 0.1}",),
            "soap moves a layer's weights by each other; take this out, or another optimizer",
        ),
        ((gossip("peers: 1"),), "holds for replicas that move the same weights in step; use allreduce, got gossip"),
        (
            ("strategy.network.data=2", "strategy.exchange.shard=parameters"),
            "needs whole weights on each worker; use shard: gradients or less, got parameters",
        ),
        (
            ("strategy.network.data=2", "strategy.compression.type=topk"),
            (
                "needs the same gradient for each of the weights that share a value, and compression sends parts "
                "of it; use strategy.compression.type: none, or init_keeps: zeros"
            ),
        ),
    ],
)
def test_what_cannot_hold_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    assert f"config: train.init_keeps: {sentence}" in problems_of(GOOD, *_KEPT, *overrides)


@pytest.mark.parametrize("kind", ["onebit", "powersgd"])
def test_zeros_are_refused_under_compression_that_does_not_send_them_as_zeros(kind: str) -> None:
    overrides = ("strategy.network.data=2", f"strategy.compression.type={kind}")
    assert problems_of(GOOD, _KEPT[0], "train.init_keeps=zeros", *overrides) == [
        (
            f"config: train.init_keeps: needs gradients of zero where weights are, and {kind} sends others; use qsgd "
            "or topk, or take this out"
        )
    ]


def test_zeros_are_kept_under_compression_and_sharded_optimizers() -> None:
    for strategy in ("strategy.compression.type=topk", "strategy.exchange.shard=gradients"):
        load_train_config(GOOD, (_KEPT[0], "train.init_keeps=zeros", "strategy.network.data=2", strategy))
