"""Rules on solvers: a run has an optimizer or a solver, and a solver's replicas hold the same whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestray.platform.config.problems import Problem
from orchestray.trainers.config.checked_view import Rule, View
from orchestray.trainers.solvers.params import Admm, Stacking
from orchestray.trainers.sync.allreduce.params import AllReduce

_WHOLE = "a solver holds all weights as one vector on each worker"
_SUMS = "a solver sums the loss and its derivatives at each place that it tries"
_NEEDS: tuple[tuple[str, Any, str], ...] = (
    ("strategy.exchange.type", "allreduce", f"{_SUMS}, over replicas with the same weights"),
    ("strategy.network.tensor", 1, _WHOLE),
    ("strategy.network.pipeline", 1, _WHOLE),
    ("strategy.compression.type", "none", f"{_SUMS}, and a line search needs them exactly"),
    ("strategy.aggregation.type", "mean", f"{_SUMS}, so no replica has a gradient to choose"),
    ("train.recompute", "none", "a solver takes derivatives of derivatives, which recomputed activations do not have"),
    ("train.average", None, "a solver's steps are not noisy, and their mean is behind the last of them"),
    ("train.grad_clip", None, "a solver chooses the length of its step itself"),
    ("train.lr_scaling", None, "a solver chooses the length of its step itself"),
    ("train.batch_schedule", None, "a solver's memory is of one batch size"),
    ("train.noise_scale", None, "the noise scale is measured in the backward pass of an optimizer's step"),
)
"""Keys, the value that a solver needs, and the reason."""
_OF_ALLREDUCE = (
    ("shard", "none", _WHOLE),
    ("algorithm", "native", f"{_SUMS}, by the native all-reduce"),
    ("factors", "never", f"{_SUMS}, whole and not in factors"),
)


def _one_of_both(view: View) -> Iterator[Problem]:
    optimizer, solver = view("train.optimizer"), view("train.solver")
    if optimizer is None and solver is None:
        yield Problem("train.optimizer", "is required, and missing: give optimizer, or solver")
    if optimizer is not None and solver is not None:
        text = "give either optimizer or solver, not both (on the command line, train.optimizer=null drops one)"
        yield Problem("train.solver", text)


def _needs(path: str, wanted: Any, reason: str) -> Rule:
    def rule(view: View) -> Iterator[Problem]:
        if view("train.solver") is None or (given := view(path)) == wanted:
            return
        advice = "take it out" if wanted is None else f"use {path.rpartition('.')[2]}: {wanted}"
        yield Problem(path, f"{reason}; {advice}, or train.optimizer, got {_shown(given)}")

    return rule


def _allreduce(view: View) -> Iterator[Problem]:
    exchange = view("strategy.exchange")
    if view("train.solver") is None or not isinstance(exchange, AllReduce):
        return
    for key, wanted, reason in _OF_ALLREDUCE:
        if (given := getattr(exchange, key)) != wanted:
            text = f"{reason}; use {key}: {wanted}, or train.optimizer, got {_shown(given)}"
            yield Problem(f"strategy.exchange.{key}", text)


def _precision(view: View) -> Iterator[Problem]:
    if view("train.solver") is not None and view("train.precision") == "bfloat16":
        text = "the roundings of bfloat16 are larger than what a solver's steps differ by; use float32 or float64"
        yield Problem("train.precision", text)


def _drop_last(view: View) -> Iterator[Problem]:
    solver = view("train.solver")
    if solver is not None and view("train.drop_last") and (solver.needs_same_batch or solver.needs_whole_data):
        text = f"leaves out other samples in each epoch, and {solver.type} compares gradients of the same samples"
        yield Problem("train.drop_last", f"{text}; set it to false")


def _least_squares(view: View) -> Iterator[Problem]:
    solver = view("train.solver")
    if isinstance(solver, Admm | Stacking) and solver.weight_decay:
        text = f"{solver.type} solves for the weights by plain least squares, which have no penalty; take it out"
        yield Problem("train.solver.weight_decay", text)


def _byzantine(view: View) -> Iterator[Problem]:
    if view("train.solver") is None:
        return
    for index, fault in enumerate(view("faults")):
        if fault.kind == "byzantine":
            text = "corrupts the gradient of a backward pass, and a solver takes derivatives otherwise; take it out"
            yield Problem(f"faults.{index}", text)


def _shown(given: object) -> str:
    return str(getattr(given, "type", given))


SOLVER_RULES: tuple[Rule, ...] = (
    _one_of_both,
    *(_needs(*each) for each in _NEEDS),
    _allreduce,
    _precision,
    _drop_last,
    _least_squares,
    _byzantine,
)
