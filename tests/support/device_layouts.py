"""Layouts, exchanges and optimizers that run on the device of the tests, in groups that run at once.

A value has the keywords of `layout_settings`, and `task`: what makes the task, where that is not `TinyTask`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from support.tiny_task import TinyTask

Layouts = dict[str, dict[str, Any]]


class Rectified(TinyTask):
    """A task whose network ADMM can solve for by turns."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Normalised(TinyTask):
    """A task whose network normalises batches."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)


_TWO = {"data": 2}
_SHORT = {"precision": "bfloat16"}
_BUTTERFLY = {"algorithm": "butterfly"}
_ELASTIC = {"type": "elastic_averaging"}
_SGD = {"type": "sgd", "lr": 0.1}
_ONCE = {"network": {"microbatches": 1}, "steps": 3}
_WHOLE = {**_ONCE, "batch_size": 37}

COMPRESSED: Layouts = {
    "float16": {},
    "bfloat16": {},
    "qsgd": {"huffman": True},
    "terngrad": {},
    "onebit": {},
    "topk": {"ratio": 0.3},
    "threshold": {"threshold": 0.1},
    "adaptive_threshold": {"ratio": 0.3},
    "dgc": {"ratio": 0.3},
    "powersgd": {},
}
"""Keywords of each registered compression."""
_TOP_K = {"type": "topk", **COMPRESSED["topk"]}

LAYOUTS: Layouts = {
    "one": {},
    "one, clipped": {"grad_clip": 0.05},
    "one, adamw and an average": {"optimizer": {"type": "adamw", "lr": 0.01}, "average": {"type": "ema"}},
    "data": {"network": _TWO},
    "data, clipped": {"network": _TWO, "grad_clip": 0.05},
    "zero1": {"network": _TWO, "exchange": {"shard": "optimizer"}},
    "zero2": {"network": _TWO, "exchange": {"shard": "gradients"}},
    "zero3": {"network": _TWO, "exchange": {"shard": "parameters"}},
    "averaging": {"network": _TWO, "exchange": {"type": "averaging", "every": 2}},
    "tensor": {"network": {"tensor": 2}},
    "tensor, clipped": {"network": {"tensor": 2}, "grad_clip": 0.05},
    "pipeline": {"network": {"pipeline": 2}},
    "tensor and pipeline": {"network": {"tensor": 2, "pipeline": 2}},
    "gossip": {"network": _TWO, "exchange": {"type": "gossip"}},
    "elastic averaging": {"network": _TWO, "exchange": _ELASTIC},
    "independent": {"network": _TWO, "exchange": {"type": "independent"}},
    "noise scale": {
        "network": {**_TWO, "microbatches": 1},
        "batch_schedule": {"type": "noise_scale", "max_batch_size": 36},
    },
    "batch normalisation": {"network": {**_TWO, "microbatches": 1}, "task": Normalised},
    "local batch normalisation": {
        "network": {**_TWO, "microbatches": 1},
        "batch_norm": "local",
        "task": Normalised,
    },
    "recomputed": {"network": _TWO, "recompute": "sqrt"},
    "one in bfloat16": _SHORT,
    "data in bfloat16": {"network": _TWO, **_SHORT},
    "zero3 in bfloat16": {"network": _TWO, "exchange": {"shard": "parameters"}, **_SHORT},
}
IN_FLOAT32 = {"one in bfloat16": "one", "data in bfloat16": "data", "zero3 in bfloat16": "zero3"}
"""Layouts whose operations a device rounds as its own list of them says, and the same in float32."""

_TRAINED_BY = {"dgc": {"optimizer": _SGD}}
"""Keywords of training by compressions that keep momentum themselves."""
EXCHANGES: Layouts = {
    "factors": {"network": _TWO, "exchange": {"factors": "always"}},
    "a store": {"network": _TWO, "exchange": {"factors": "auto", "store_shards": 2}},
    **{
        f"compressed by {kind}": {"network": _TWO, "compression": {"type": kind, **keys}, **_TRAINED_BY.get(kind, {})}
        for kind, keys in COMPRESSED.items()
    },
    # All indices are sent, so that from the second step on they repeat, and the values go alone.
    "four merge in pairs": {"network": {"data": 4}, "compression": {"type": "topk", "ratio": 1.0}},
    "nested butterfly": {"network": _TWO, "exchange": _BUTTERFLY, "compression": _TOP_K},
    "gossip, compressed": {
        "network": _TWO,
        "exchange": {"type": "gossip", "graph": "ring"},
        "compression": _TOP_K,
    },
    "elastic averaging, compressed": {"network": _TWO, "exchange": _ELASTIC, "compression": {"type": "qsgd"}},
    "median": {"network": {"data": 3}, "aggregation": {"type": "median"}},
    "trimmed mean": {"network": {"data": 3}, "aggregation": {"type": "trimmed_mean"}},
    "asynchronous gossip": {"network": _TWO, "exchange": {"type": "gossip", "consistency": "asynchronous"}},
    "asynchronous elastic averaging": {"network": _TWO, "exchange": {**_ELASTIC, "consistency": "asynchronous"}},
}
BY_TIMES = {"asynchronous gossip", "asynchronous elastic averaging", "servers, compressed"}
"""Runs whose bits depend on the order of events, on the CPU as well; their waits are a part of those that are stated.

Workers under servers take shares as they come to them, and each keeps what its own compression has left out.
"""

_STEPS = {"natural_gradient": {"steps": 5}}
"""Steps of those that do not measure in each of the first three."""
OPTIMIZERS: Layouts = {
    **{
        kind: {"optimizer": {"type": kind, "lr": 0.01}, **_STEPS.get(kind, {})}
        for kind in (
            *("sgd", "adagrad", "rmsprop", "adam", "adamw", "lars", "lamb"),
            *("kfac", "natural_gradient", "muon", "soap", "yellowfin"),
        )
    },
    **{
        f"{kind}, spread": {"network": _TWO, "optimizer": {"type": kind, "lr": 0.01}, **_STEPS.get(kind, {})}
        for kind in ("kfac", "natural_gradient", "soap")
    },
    **{
        kind: {"solver": {"type": kind}, **_ONCE}
        for kind in ("newton", "levenberg_marquardt", "hessian_free", "neumann")
    },
    **{kind: {"solver": {"type": kind, "lr": 0.1}, **_ONCE} for kind in ("stochastic_lbfgs", "svrg")},
    **{kind: {"solver": {"type": kind}, **_WHOLE} for kind in ("conjugate_gradient", "bfgs", "lbfgs")},
    "admm": {"solver": {"type": "admm"}, **_WHOLE, "task": Rectified},
}
GROUPS: dict[str, Layouts] = {"layouts and optimizers": {**LAYOUTS, **OPTIMIZERS}, "exchanges": EXCHANGES}
"""Groups of layouts: a process each."""
ALL: Layouts = {**LAYOUTS, **EXCHANGES, **OPTIMIZERS}

SERVERS: dict[str, dict[str, Any]] = {
    "servers": {},
    "servers, factors": {"exchange": {"factors": "always"}},
    "servers, compressed": {"compression": _TOP_K},
}
"""Keywords of `central_settings` of runs under two parameter servers."""

NOT_HELD = {
    "stacking": "it needs a network of its own, and a batch of all samples of it",
    "krum": "it needs five workers; the same code gathers for it as for the median",
    "multi_krum": "it needs five workers; the same code gathers for it as for the median",
}
"""Registered exchanges, compressions, aggregations, optimizers and solvers that do not run on the device, and why."""
