"""Early stopping around every method whose trials may be stopped: it comes to its end and can be replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from orchestray.search.methods.base import Method, Proposal
from orchestray.search.registry.methods import METHODS, make_method
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.base import ArchitectureSpace, plain_key
from orchestray.search.spaces.architectures.modules import Modules
from orchestray.search.spaces.architectures.topology import Topology
from orchestray.search.spaces.dimensions import Binary, Dimension, Uniform
from support.bit_space import BitSpace
from support.replayed import replay
from support.toy_choices import Layers

NUMBERS: Mapping[str, Dimension] = {"x": Uniform(0.0, 1.0), "y": Uniform(0.0, 1.0)}
BITS: Mapping[str, Dimension] = {f"b{bit}": Binary() for bit in range(6)}
NO_NUMBERS: Mapping[str, Dimension] = {}
SMALL_MODULES: Callable[[], ArchitectureSpace] = lambda: Modules(channels=(2, 4), stem=2, max_halvings=1)  # noqa: E731
INNER: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Dimension], Callable[[], ArchitectureSpace] | None]] = {
    "grid": ({"points": {"x": 5, "y": 4}}, NUMBERS, None),
    "random": ({}, NUMBERS, None),
    "bayesian": ({"model": "tpe"}, NUMBERS, None),
    "particle_swarm": ({"population": 5}, NUMBERS, None),
    "spectral": ({"samples": 8, "stages": 2}, BITS, None),
    "regularized_evolution": ({"population": 6}, NUMBERS, lambda: Layers(3)),
    "large_scale_evolution": ({"population": 6}, NUMBERS, lambda: Layers(3)),
    "genetic_cnn": ({"population": 6}, NO_NUMBERS, lambda: BitSpace(5)),
    "hierarchical_evolution": ({"population": 6, "initial_mutations": 2}, NUMBERS, lambda: Layers(3)),
    "codeepneat": ({"population": 4, "networks": 6}, NUMBERS, SMALL_MODULES),
    "neat": ({"population": 8}, NO_NUMBERS, lambda: Topology(inputs=2, outputs=1)),
    "reinforce": ({"children": 4}, NO_NUMBERS, lambda: Layers(3)),
    "q_learning": ({}, NO_NUMBERS, lambda: Layers(3)),
    "tree_search": ({}, NO_NUMBERS, lambda: Layers(3)),
    "progressive": ({"beam": 4}, NO_NUMBERS, lambda: Layers(3)),
}
"""Each method with its parameters, what it searches, and its space."""
TRIALS, STEPS = 24, 16


def score(proposal: Proposal, step: int) -> float:
    """Return a curve that rises to a hash of the trial's point; every seventh trial fails on its way."""
    if proposal.trial % 7 == 6 and step > 4:
        raise RuntimeError("diverged")
    point = plain_key([proposal.genome, dict(proposal.changes)])
    end = np.random.default_rng(list(point.encode())).random()
    return float(end * (1 - math.exp(-step / 4)))


def made(stopping: str, inner: str) -> Method:
    parameters, space, architecture = INNER[inner]
    return make_method(
        stopping,
        space=space,
        architecture=None if architecture is None else architecture(),
        trials=TRIALS,
        steps_per_trial=STEPS,
        seed=1,
        proposals={"type": inner, **parameters},
    )


def test_every_method_that_a_config_allows_inside_is_here() -> None:
    assert set(INNER) == {name for name in METHODS if METHODS.params(name).why_not_within is None}


@pytest.mark.parametrize("inner", sorted(INNER))
@pytest.mark.parametrize("stopping", ["asha", "median_stopping", "learning_curve"])
def test_every_trial_ends_the_inner_method_comes_to_its_end_and_less_is_trained(stopping: str, inner: str) -> None:
    method = made(stopping, inner)
    searched = simulate(method, score, workers=3)
    assert method.is_done
    assert {trial.status for trial in searched.trials.values()} <= {"succeeded", "stopped", "failed"}
    parameters, space, architecture = INNER[inner]
    common: dict[str, Any] = {"space": space, "trials": TRIALS, "steps_per_trial": STEPS, "seed": 1}
    alone = make_method(inner, architecture=None if architecture is None else architecture(), **common, **parameters)
    plain = simulate(alone, score, workers=3)
    assert len(searched.trials) > len(plain.trials) / 2
    if inner == "neat":
        assert searched.steps == 0, "its networks are evaluated as they are: there is nothing to stop"
    else:
        assert any(trial.status == "stopped" for trial in searched.trials.values())
        assert searched.steps / len(searched.trials) < plain.steps / len(plain.trials)
    replay(made(stopping, inner), searched.calls)


@pytest.mark.parametrize("inner", ["genetic_cnn", "codeepneat", "reinforce"])
def test_successive_halving_around_generations_trains_the_best_of_each_to_its_end(inner: str) -> None:
    searched = simulate(made("asha", inner), lambda proposal, step: proposal.trial * 31 % 17 + step / 100, workers=3)
    ends = [trial for trial in searched.trials.values() if trial.status == "succeeded"]
    assert ends
    assert all(trial.step == STEPS for trial in ends)
    assert searched.best.status == "succeeded"
