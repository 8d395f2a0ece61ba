"""Every exchange under NCCL's rules, in random orders: none waits for ever, and all orders give the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.compression.registry import COMPRESSIONS
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.exchange import Exchange
from orchestray.trainers.sync.factory import make_exchange
from orchestray.trainers.sync.registry import EXCHANGES
from support.device_layouts import COMPRESSED
from support.nccl import run_on_gpus
from support.threads import run_replicas

STEPS, SAMPLES = 2, 12
ALLREDUCE = {"type": "allreduce"}
TOP_K = {"type": "topk", **COMPRESSED["topk"]}
SCHEMES: dict[str, dict[str, Any]] = {
    "allreduce": {"exchange": {**ALLREDUCE, "bucket_mb": 0.0001}},
    "allreduce after the backward pass": {"exchange": {**ALLREDUCE, "overlap": False}},
    **{
        f"algorithm {name}": {"exchange": {**ALLREDUCE, "algorithm": name, "bucket_mb": 0.0001}}
        for name in ("tree", "butterfly", "ring", "rabenseifner", "auto")
    },
    **{
        f"sharded {name}": {"exchange": {**ALLREDUCE, "shard": name}}
        for name in ("optimizer", "gradients", "parameters")
    },
    "factors": {"exchange": {**ALLREDUCE, "factors": "always"}},
    "factors, or gradients through a store": {"exchange": {**ALLREDUCE, "factors": "auto", "store_shards": 3}},
    **{
        f"compressed by {name}": {"exchange": ALLREDUCE, "compression": {"type": name, **keys}}
        for name, keys in COMPRESSED.items()
    },
    "compressed by topk over a nested butterfly": {
        "exchange": {**ALLREDUCE, "algorithm": "butterfly"},
        "compression": TOP_K,
    },
    "median": {"exchange": ALLREDUCE, "aggregation": {"type": "median"}},
    **{
        f"gossip, {graph}": {"exchange": {"type": "gossip", "graph": graph}} for graph in ("random", "ring", "complete")
    },
    "gossip, asynchronous": {"exchange": {"type": "gossip", "consistency": "asynchronous"}},
    "gossip, push-sum": {"exchange": {"type": "gossip", "mixing": "push_sum"}},
    "gossip, compressed": {
        "exchange": {"type": "gossip", "graph": "ring"},
        "compression": TOP_K,
    },
    "gossip, in messages of unlike lengths": {
        "exchange": {"type": "gossip", "graph": "ring"},
        "compression": {"type": "adaptive_threshold", **COMPRESSED["adaptive_threshold"]},
    },
    "averaging": {"exchange": {"type": "averaging", "every": 1}},
    "averaging, compressed": {"exchange": {"type": "averaging", "every": 1}, "compression": {"type": "qsgd"}},
    "elastic": {"exchange": {"type": "elastic_averaging"}},
    "elastic, compressed": {"exchange": {"type": "elastic_averaging"}, "compression": {"type": "qsgd"}},
    "elastic, asynchronous": {"exchange": {"type": "elastic_averaging", "consistency": "asynchronous"}},
    "elastic, asynchronous, compressed": {
        "exchange": {"type": "elastic_averaging", "consistency": "asynchronous"},
        "compression": {"type": "qsgd"},
    },
    "independent": {"exchange": {"type": "independent"}},
}
BY_TIMES = {
    "algorithm auto",
    "gossip, asynchronous",
    "elastic, asynchronous",
    "elastic, asynchronous, compressed",
}
"""Schemes whose bits depend on the order of events: one chooses by times, others pull when they get there."""


def exchange_of(strategy: Mapping[str, Any], size: int) -> Callable[[], Exchange]:
    """Return a function that makes the exchange of a config."""
    config = load_train_config(
        {
            "name": "order",
            "task": {"type": "digits"},
            "train": {"batch_size": SAMPLES, "steps": STEPS, "optimizer": {"type": "sgd", "lr": 0.1}},
            "strategy": {"network": {"data": size}, **strategy},
        }
    )
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    return lambda: make_exchange(
        **settings.exchange, compression=settings.compression, aggregation=settings.aggregation, seed=settings.seed
    )


def trained(make: Callable[[], Exchange], model: nn.Module, x: Tensor, collective: Collective) -> dict[str, Tensor]:
    """Train as the loop does, and return what this rank holds then."""
    exchange, own = make(), copy.deepcopy(model)
    exchange.attach(own, collective)
    mine = x.tensor_split(collective.size)[collective.rank]
    for step in range(1, STEPS + 1):
        exchange.before_step(step)
        exchange.begin_backward(last_micro_batch=True)
        (own(mine).square().sum() / (len(mine) if exchange.diverges else len(x))).backward()
        exchange.fraction = len(mine) / len(x)
        exchange.finish([1.0])
        with torch.no_grad():
            for update, gradient in zip(exchange.updates(), exchange.gradients(), strict=True):
                if gradient is not None:
                    update.tensor.sub_(gradient, alpha=0.05)
        exchange.after_step(step)
    with exchange.consensus():
        own(mine)
        exchange.rest()
    exchange.agree()
    found = {name: held.tensor.detach().clone() for name, held in exchange.held().items()}
    exchange.detach()
    return found


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("num_seeds", [4, pytest.param(320, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEMES)
def test_an_exchange_waits_for_nothing_for_ever_and_gives_the_same_bits_in_any_order(name: str, num_seeds: int) -> None:
    size = 4
    make, model, x = exchange_of(SCHEMES[name], size), small_model(), torch.randn(SAMPLES, 6).double()
    # A wait that is left out gives values of before, and the same in any order: what gloo gives is known to be right.
    over_gloo = run_replicas(size, lambda member: trained(make, model, x, member))
    first: list[dict[str, Tensor]] | None = None
    for seed in range(num_seeds):
        room = (None, 1)[seed % 2]
        found, gpus = run_on_gpus(size, lambda member: trained(make, model, x, member), seed=seed, room=room)
        first = first or found
        for here, before, wanted in zip(found, first, over_gloo, strict=True):
            assert here.keys() == before.keys()
            for key, value in here.items():
                assert not value.isnan().any(), key
                if name not in BY_TIMES:
                    assert torch.equal(value, before[key]), (seed, key)
                    assert torch.allclose(value, wanted[key], rtol=1e-9, atol=1e-12), key
        assert not [known for known in gpus.communicators if " " in known], "no communicator of a pair"
        assert len(gpus.communicators) <= 3, "one for all, and one for each order of its own"


def test_every_exchange_and_every_compression_is_among_them() -> None:
    exchanges = {scheme["exchange"]["type"] for scheme in SCHEMES.values()}
    assert set(EXCHANGES) - exchanges == {"parameter_server"}, "its workers and servers talk over channels"
    assert set(COMPRESSIONS) - COMPRESSED.keys() == {"none"}
