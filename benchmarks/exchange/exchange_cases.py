"""The exchanges that `exchanges.py` compares: each a few lines of `strategy`, and what it survives."""

from __future__ import annotations

import math
from typing import Any

_STEPS_AN_EPOCH = 23
_WARM_UP_EPOCHS = 4
"""Warm-up of deep gradient compression, as its authors have it (Lin et al. 2018, section 3.3)."""

_LOCK_STEP = "any worker: rolled into the step that was lost"
_LAST_CHECKPOINT = "any worker: from the last checkpoint"
_SERVERS = "workers: the others go on; servers: from the last checkpoint"
_REPLICAS = "workers: the other replicas go on; servers: from the last checkpoint"
_LEAVES = "workers: the others go on; leaf servers, shards: from the last checkpoint"


def _server(**keys: Any) -> dict[str, Any]:
    return {"exchange": {"type": "parameter_server", **keys}}


def _compressed(**keys: Any) -> dict[str, Any]:
    return {"compression": keys}


EXCHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "all-reduce": ({}, _LOCK_STEP),
    "all-reduce, ring": ({"exchange": {"type": "allreduce", "algorithm": "ring"}}, _LOCK_STEP),
    "all-reduce, Rabenseifner": ({"exchange": {"type": "allreduce", "algorithm": "rabenseifner"}}, _LOCK_STEP),
    "all-reduce, float16": (_compressed(type="float16"), _LOCK_STEP),
    "all-reduce, QSGD 4 bits": (_compressed(type="qsgd"), _LOCK_STEP),
    "all-reduce, TernGrad": (_compressed(type="terngrad"), _LOCK_STEP),
    "all-reduce, 1 bit": (_compressed(type="onebit"), _LAST_CHECKPOINT),
    "all-reduce, 1 bit, sizes by row": (_compressed(type="onebit", scale="row"), _LAST_CHECKPOINT),
    "all-reduce, top 1 %": (_compressed(type="topk"), _LAST_CHECKPOINT),
    "all-reduce, DGC 0.1 %": (
        _compressed(type="dgc", momentum=0.0, warmup_steps=_WARM_UP_EPOCHS * _STEPS_AN_EPOCH),
        _LAST_CHECKPOINT,
    ),
    "all-reduce, PowerSGD rank 2": (_compressed(type="powersgd"), _LAST_CHECKPOINT),
    "median of gradients": ({"network": {"data": 3}, "aggregation": {"type": "median"}}, _LOCK_STEP),
    "servers, synchronous": (_server(), _SERVERS),
    "servers, stale by 4": (_server(consistency="stale", staleness=4), _SERVERS),
    "servers, asynchronous": (_server(consistency="asynchronous"), _SERVERS),
    "servers with copies": (_server(consistency="asynchronous", replicas=2), "any process: nothing is lost"),
    "Downpour, push and fetch 4": (_server(consistency="asynchronous", push_every=4, fetch_every=4), _SERVERS),
    "servers, 1 bit": ({**_server(consistency="asynchronous"), **_compressed(type="onebit")}, _SERVERS),
    "servers, one backup worker": ({**_server(backup_workers=1), "network": {"data": 3}}, _SERVERS),
    "two leaf servers, stale by 4 (Rudra)": (
        {**_server(consistency="stale", staleness=4, groups=2, lr_scale="inverse_staleness"), "network": {"data": 4}},
        _LEAVES,
    ),
    "two places, changes of 1 % (Gaia)": (
        {**_server(consistency="asynchronous", groups=2, significance=0.01), "network": {"data": 4}},
        _LEAVES,
    ),
    "DistBelief, two stages": (
        {**_server(consistency="asynchronous", shards=2), "network": {"data": 2, "pipeline": 2}},
        _REPLICAS,
    ),
    "DistBelief, layers in two": (
        {**_server(consistency="asynchronous", shards=2), "network": {"data": 2, "tensor": 2}},
        _REPLICAS,
    ),
    "shared memory (HOGWILD)": (_server(consistency="asynchronous", transport="shared_memory"), _SERVERS),
    "gossip, random pairs": ({"network": {"data": 4}, "exchange": {"type": "gossip"}}, _LAST_CHECKPOINT),
    "gossip, push-sum": (
        {"network": {"data": 4}, "exchange": {"type": "gossip", "mixing": "push_sum"}},
        _LAST_CHECKPOINT,
    ),
    "gossip on a ring, QSGD (CHOCO)": (
        {"network": {"data": 4}, "exchange": {"type": "gossip", "graph": "ring"}, **_compressed(type="qsgd")},
        _LAST_CHECKPOINT,
    ),
    "local SGD, every 16": ({"exchange": {"type": "averaging", "every": 16}}, _LAST_CHECKPOINT),
    "average at the end": ({"exchange": {"type": "averaging", "every": "end"}}, _LAST_CHECKPOINT),
    "DiLoCo, every 50": (
        {
            "exchange": {
                "type": "averaging",
                "every": 50,
                "outer_optimizer": {"type": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True},
            }
        },
        _LAST_CHECKPOINT,
    ),
    "elastic averaging, every 8": ({"exchange": {"type": "elastic_averaging", "every": 8}}, _LAST_CHECKPOINT),
    "ensemble of 2": ({"exchange": {"type": "independent"}}, _LAST_CHECKPOINT),
    "ensemble of 2, shared trunk (TreeNets)": ({"exchange": {"type": "independent", "trunk": 2}}, _LAST_CHECKPOINT),
}
"""By name: what each changes in `strategy`, and which losses it takes."""


def strategy(name: str) -> dict[str, Any]:
    """Return the `strategy` of the exchange of this name: two replicas, where it says nothing else."""
    return {"network": {"data": 2}, **EXCHANGES[name][0]}


def num_workers(name: str) -> int:
    """Return the number of processes that compute: a replica may be several."""
    return math.prod(strategy(name)["network"].values())
