"""The conversion of a population that is one trial to its program's JSON arguments, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import PackedMember
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Integer, Uniform, make_dimension
from orchestray.trainers.config.obeyed import not_obeyed

if TYPE_CHECKING:
    from orchestray.search.methods.base import Report
    from orchestray.trainers.config.schema import TrainConfig

PROGRAM = "packed"
PREFIX = "train.optimizer."
VARIED: Mapping[str, tuple[str, ...]] = {
    "sgd": ("lr", "momentum", "weight_decay"),
    "adam": ("lr", "eps", "weight_decay"),
    "adamw": ("lr", "eps", "weight_decay"),
}
"""Maps each optimizer that supports batched members to the parameters that may differ between members."""


def arguments(space: Mapping[str, Dimension], **parameters: Any) -> dict[str, Any]:
    """Return the arguments of `PROGRAM`: the space as in a config, and the method's parameters."""
    return {"space": {key: written(dimension) for key, dimension in space.items()}, **parameters}


def written(dimension: Dimension) -> dict[str, Any]:
    """Return a dimension as in a config."""
    match dimension:
        case Uniform(low, high, is_log) | Integer(low, high, is_log):
            kind = "uniform" if isinstance(dimension, Uniform) else "integer"
            return {"type": f"log_{kind}" if is_log else kind, "low": low, "high": high}
        case Choice(values):
            return {"type": "choice", "values": list(values)}
        case Binary():
            return {"type": "binary"}
    raise TypeError(f"{type(dimension).__name__} is no dimension that a config can write")


def read(space: Mapping[str, Mapping[str, Any]]) -> dict[str, Dimension]:
    """Return the dimensions of a space as in a config."""
    return {key: make_dimension(**dimension) for key, dimension in space.items()}


_OBEYED = {
    *("batch_size", "drop_last", "epochs", "steps", "optimizer", "lr_schedule", "grad_clip", "seed", "precision"),
    *("validate_every_steps", "loss_is", "batch_norm", "buffers", "init", "init_gain", "init_from"),
    *("init_except", "freeze", "accumulate"),
}
"""Keys of `train` that a packed population obeys."""
_REASONS = dict.fromkeys(("until", "early_stopping", "time_limit_s"), "packed members end together")
"""Reasons why it does not obey others."""


def check_config(config: TrainConfig, varied: Sequence[str]) -> None:
    """Refuse a training config that cannot be batched.

    Args:
        config: training config of the members.
        varied: dotted keys that differ between members.

    Raises:
        ConfigError: with every reason.
    """
    train = config.train
    if train.optimizer is None:
        raise ConfigError("packed: train.solver: is not there for many members at once; use packed: false")
    kind = train.optimizer.type
    allowed = [PREFIX + name for name in VARIED.get(kind, ())]
    problems = []
    if train.optimizer.groups:
        problems.append("train.optimizer.groups: not there for many members at once; use packed: false")
    if kind not in VARIED:
        problems.append(f"train.optimizer.type: {kind} is not there for many members at once; use {', '.join(VARIED)}")
    else:
        problems += [
            f"search.space: {key} cannot differ between members of one batched program, which may differ in "
            f"{', '.join(allowed)}; use packed: false"
            for key in varied
            if key not in allowed
        ]
    if config.strategy.network.data * config.strategy.network.tensor * config.strategy.network.pipeline > 1:
        problems.append("strategy.network: a packed population is one process; use data: 1, or packed: false")
    if train.precision == "bfloat16":
        problems.append("train.precision: packed members train in float32 or float64; use packed: false for bfloat16")
    refused = not_obeyed(train, _OBEYED, _REASONS, "is not there for packed members")
    problems += [f"{text}; take it out, or use packed: false" for text in refused]
    if problems:
        raise ConfigError([f"packed: {problem}" for problem in problems])


def members_after(
    before: Sequence[PackedMember], initial: Sequence[Mapping[str, Any]], report: Report
) -> tuple[PackedMember, ...]:
    """Return the members after a report.

    Args:
        before: the members before it; empty before the first report.
        initial: each member's first values.
        report: report of the packed population, with the results of `PackedPopulation`.
    """
    first = [PackedMember(values, news=((0, None, "drawn", dict(values)),)) for values in initial]
    num_best = int(report.told["best"])
    best_score = max((member.score for member in before if member.is_best and member.score is not None), default=None)
    is_better = best_score is None or report.score > best_score
    members = []
    for number, (member, state) in enumerate(zip(before or first, report.told["members"], strict=True)):
        news = () if before else member.news
        for line in report.told["lineage"]:
            if line["member"] == number:
                news += ((line["step"], line["parent"], line["change"], dict(line["changes"])),)
                member = replace(member, parent=line["parent"], change=line["change"])
        score, changes = state["score"], dict(state["changes"])
        if score is not None and (member.score is None or score > member.score):
            member = replace(member, score=score, best_changes=changes)
        is_best = number == num_best if is_better else member.is_best
        leads = number == num_best
        members.append(
            replace(member, changes=changes, last_score=score, leads=leads, is_best=is_best, news=tuple(news))
        )
    return tuple(members)
