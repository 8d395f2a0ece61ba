"""The optimizer of a replica, refused where the model has not what it needs, or a worker holds too little of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.grouped_optimizer import check_matches, first_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from orchestray.trainers.core.exchange import OptimizedTensor
    from orchestray.trainers.optim.optimizers import Optimizer


def make_fitting(chosen: Mapping[str, Any], model: nn.Module) -> Optimizer:
    """Return the optimizer of a section.

    Args:
        chosen: values of the section.
        model: the plain model.

    Raises:
        ConfigError: a group of parameters matches none of the model, or the optimizer does not fit it.
    """
    optimizer = make_optimizer(**chosen)
    optimizer.prepare(model)
    optimizer.first_names = first_names(model)
    if groups := chosen.get("groups", ()):
        check_matches(groups, model.named_parameters())
    return optimizer


def check_outer(exchange: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse groups of an outer optimizer that match no parameter of the plain model.

    Args:
        exchange: values of `strategy.exchange`.
        model: the plain model.

    Raises:
        ConfigError: names the pattern, and the nearest name.
    """
    outer = exchange.get("outer_optimizer") or {}
    check_matches(outer.get("groups", ()), model.named_parameters(), "strategy.exchange.outer_optimizer")


def num_trained(model: nn.Module) -> int:
    """Return the number of elements of the parameters that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def refuse_cuts(optimizer: Optimizer, kind: str, updates: Sequence[OptimizedTensor]) -> None:
    """Refuse an optimizer that looks at whole parameters where a worker moves a part of one by itself.

    Args:
        optimizer: optimizer of this worker.
        kind: its type, for the message.
        updates: tensors that this worker updates.

    Raises:
        ConfigError: one is a part.
    """
    cut = next((update.name for update in updates if not update.piece.is_whole), None)
    if optimizer.needs_whole and cut is not None:
        raise ConfigError(
            f"config: train.optimizer.type: {kind} looks at whole parameters, and pipedream's stages move a part of "
            f"{cut!r} each; use strategy.network.tensor: 1, another schedule, or adamw"
        )


def refuse_parts(optimizer: Optimizer, kind: str, updates: Sequence[OptimizedTensor], num_elements: int) -> None:
    """Refuse an optimizer that has to see all parameters where a worker holds some, or parts of them.

    Args:
        optimizer: optimizer of this worker.
        kind: its type, for the message.
        updates: tensors that this worker updates.
        num_elements: number of elements that are trained, over all workers of a replica.

    Raises:
        ConfigError: this worker holds too little.
    """
    if optimizer.mixes_parameters and sum(u.tensor.numel() for u in updates) < num_elements:
        raise ConfigError(
            f"config: train.optimizer.type: {kind} moves a parameter by the gradients of others as well, and here "
            "no worker has all of them; use strategy.exchange.shard: none and strategy.network.tensor: 1 and "
            "pipeline: 1, or another optimizer"
        )
