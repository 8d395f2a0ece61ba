"""Rules on optimizers that need more than the gradient of each parameter."""

from __future__ import annotations

from collections.abc import Iterator

from orchestray.platform.config.problems import Problem
from orchestray.trainers.aggregation.params import Mean
from orchestray.trainers.config.checked_view import Rule, View
from orchestray.trainers.config.compression_checks import keeps_residue
from orchestray.trainers.config.network_checks import sharding
from orchestray.trainers.optim.params import Kfac
from orchestray.trainers.sync.local.params import Averaging

_WHOLE = "kfac measures the layers of a whole model on every replica, which share each batch"


def _kfac(view: View) -> Iterator[Problem]:
    exchange, optimizer = view("strategy.exchange"), view("train.optimizer")
    if isinstance(exchange, Averaging) and isinstance(exchange.outer_optimizer, Kfac):
        text = f"{_WHOLE}, and a meeting has weights alone; use sgd"
        yield Problem("strategy.exchange.outer_optimizer.type", text)
    if not isinstance(optimizer, Kfac):
        return
    if optimizer.groups:
        text = "kfac moves a layer's weight and bias together, and clips by all of them; take them out, or use sgd"
        yield Problem("train.optimizer.groups", text)
    if exchange.type != "allreduce":
        yield Problem("strategy.exchange.type", f"{_WHOLE}; got {exchange.type}. Use allreduce, or another optimizer")
    if (shard := sharding(view)) != "none":
        text = f"{_WHOLE}; got shard: {shard}. Use none, or another optimizer"
        yield Problem("strategy.exchange.shard", text)
    for degree in ("tensor", "pipeline"):
        if (size := view(f"strategy.network.{degree}")) > 1:
            yield Problem(f"strategy.network.{degree}", f"{_WHOLE}; got {size}. Use 1, or another optimizer")
    for key in ("quantize", "weight_norm", "init_keeps"):
        if view(f"train.{key}"):
            text = "kfac moves weights by those of their layer, as they are; take it out, or use another optimizer"
            yield Problem(f"train.{key}", text)
    if keeps_residue(compression := view("strategy.compression")):
        text = f"{_WHOLE}, without a state of their own as {compression.type} has; use none, or another optimizer"
        yield Problem("strategy.compression.type", text)
    if not isinstance(aggregation := view("strategy.aggregation"), Mean):
        text = f"kfac's statistics are added up as they come, whatever {aggregation.type} does with gradients; use mean"
        yield Problem("strategy.aggregation.type", text)


OPTIMIZER_RULES: tuple[Rule, ...] = (_kfac,)
