"""Rules for every method of the registry: it is a function of its calls, survives what trials do, and ends."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Method, Proposal, Report
from orchestray.search.registry.methods import METHODS
from orchestray.search.simulation.virtual_time import Call, Evaluate, Simulated, simulate
from orchestray.search.spaces.architectures.base import key_of
from orchestray.search.spaces.dimensions import Binary, Choice
from support.bit_space import BitSpace
from support.method_cases import CASES, Case, luck, smooth, told_by
from support.replayed import replay


def run(case: Case, evaluate: Evaluate = smooth, *, workers: int = 1, method: Method | None = None) -> Simulated:
    """Run trials whose lengths differ, so that they end in another order than they began."""
    method = case.make() if method is None else method
    return simulate(
        method,
        evaluate,
        workers=workers,
        seconds_per_step=lambda proposal: 0.1 + luck(proposal, seed=99),
        reports=told_by(method.architecture),
    )


def fails_by_chance(proposal: Proposal, step: int) -> float:
    if luck(proposal, step, seed=5) < 0.25:
        raise MemoryError("out of memory")
    return smooth(proposal, step)


def diverges_by_chance(proposal: Proposal, step: int) -> float:
    draw = luck(proposal, step, seed=6)
    return math.nan if draw < 0.2 else -math.inf if draw < 0.25 else smooth(proposal, step)


def as_json(proposals: list[Proposal]) -> list[str]:
    return [json.dumps(asdict(proposal), sort_keys=True) for proposal in proposals]


def proposals_of(simulated: Simulated) -> list[Proposal]:
    return [call.answer for call in simulated.calls if call.name == "ask" and call.answer is not None]


def test_every_method_has_a_case() -> None:
    assert {case.method for case in CASES.values()} == set(METHODS)


@pytest.mark.parametrize("evaluate", [smooth, fails_by_chance, diverges_by_chance])
@pytest.mark.parametrize("name", CASES)
def test_a_search_ends_and_made_again_from_its_journal_goes_on_alike_from_any_cut(
    name: str, evaluate: Evaluate
) -> None:
    """Include trials that fail, or whose score is not a number."""
    case, method = CASES[name], CASES[name].make()
    simulated = run(case, evaluate, workers=3, method=method)
    assert all(trial.status != "running" for trial in simulated.trials.values()), "nobody is held for ever"
    assert case.trials is None or len(simulated.trials) <= case.trials
    cut = int(np.random.default_rng(1).integers(len(simulated.calls)))
    resumed = case.make()
    replay(resumed, from_json(simulated.calls[:cut]))
    replay(resumed, from_json(simulated.calls[cut:]))
    assert resumed.is_done
    assert json.loads(json.dumps(resumed.tally())) == json.loads(json.dumps(method.tally()))
    for place, proposal in enumerate(proposals_of(simulated)):
        assert proposal.trial == place
        assert json.loads(json.dumps(proposal.genome)) == proposal.genome
        assert dict(proposal.changes).keys() == ({} if proposal.program else dict(case.space)).keys()
        assert proposal.parent is None or proposal.parent in range(place)


def from_json(calls: list[Call]) -> list[Call]:
    """Return calls as a search reads them from its journal."""

    def argument(call: Call) -> Any:
        if call.argument is None:
            return None
        read = json.loads(json.dumps(asdict(call.argument)))
        kind = Report if call.name == "report" else Finished
        return kind(**{**read, **{key: tuple(value) for key, value in read.items() if isinstance(value, list)}})

    return [Call(call.name, argument(call), call.answer) for call in calls]


def ties(proposal: Proposal, step: int) -> float:
    """Return a score that many trials have: the best of them may depend on the order in which they came."""
    return round(3 * smooth(proposal, step)) / 3


ORDER_FREE = [name for name, case in CASES.items() if case.make().is_order_free]
"""Cases that claim it. That they do is held to docs/explanation/search-methods.md by `test_docs_search`."""


@pytest.mark.parametrize(
    ("name", "evaluate"),
    [
        (name, evaluate)
        for name in ORDER_FREE
        for evaluate in (smooth, ties, fails_by_chance)
        # the trial that a replacement copies depends on the reports by then; the docstring of the population says so
        if not (CASES[name].method == "population_based_training" and evaluate is fails_by_chance)
    ],
)
def test_order_free_methods_propose_the_same_and_find_the_same_best_at_any_number_of_workers(
    name: str, evaluate: Evaluate
) -> None:
    case = CASES[name]
    alone, together = (run(case, evaluate, workers=workers, method=case.make(seed=3)) for workers in (1, 8))
    assert sorted(as_json(proposals_of(alone))) == sorted(as_json(proposals_of(together)))
    if any(trial.score is not None for trial in alone.trials.values()):
        assert alone.best.score == together.best.score


@pytest.mark.parametrize("name", CASES)
def test_a_search_of_one_trial_or_less_than_it_wants_ends_or_is_refused(name: str) -> None:
    for trials in (1, 3):
        if CASES[name].parameters.get("population", 1) > trials and CASES[name].method != "particle_swarm":
            with pytest.raises(ConfigError, match="population"):
                CASES[name].make(trials=trials)
            continue
        if CASES[name].method == "omnivore" and trials == 1:
            with pytest.raises(ConfigError, match="trials"):
                CASES[name].make(trials=trials)
            continue
        method = CASES[name].make(trials=trials)
        simulated = run(CASES[name], workers=2, method=method)
        assert 1 <= len(simulated.trials) <= trials
        assert method.is_done


@pytest.mark.parametrize("name", CASES)
def test_every_trial_failing_ends_the_search(name: str) -> None:
    def fail(_proposal: Proposal, _step: int) -> float:
        raise RuntimeError("no device")

    simulated = run(CASES[name], fail, workers=3)
    assert simulated.trials
    assert {trial.status for trial in simulated.trials.values()} == {"failed"}


AGAIN = {"large_scale_evolution", "population_based_training", "population_based_training, t-test",
         "population_based_training, synchronous", "particle_swarm", "particle_swarm, synchronous", "darts", "enas",
         "smash"}  # fmt: skip
"""Cases whose trials may well be alike: weights are handed down, or shared."""


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("name", [name for name in CASES if name not in AGAIN])
def test_nothing_is_evaluated_twice(name: str, workers: int) -> None:
    method = CASES[name].make()
    keys = [
        (json.dumps(dict(proposal.changes), sort_keys=True),
         None if method.architecture is None else key_of(method.architecture, proposal.genome))
        for proposal in proposals_of(run(CASES[name], workers=workers, method=method))
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", CASES)
def test_a_space_of_few_points_is_exhausted_without_an_endless_search(name: str) -> None:
    """Search a space of one value, and one of four, with more trials than there are points."""
    case = CASES[name]
    for bits in (0, 2):
        changed: dict[str, Any] = {"trials": None if case.trials is None else 40}
        if case.space:
            changed["space"] = {f"bit{bit}": Binary() for bit in range(bits)} or {"k": Choice((1,))}
        if case.architecture is not None and isinstance(case.architecture(), BitSpace):
            changed["architecture"] = BitSpace(bits or 1)
        if case.method == "grid":
            changed["points"] = {}
        if bits == 0 and case.method in {"genetic_cnn", "spectral"}:  # they work on bits
            with pytest.raises(ConfigError):
                case.make(**changed)
            continue
        method = case.make(**changed)
        simulated = run(case, workers=3, method=method)
        assert method.is_done
        if name not in AGAIN and case.method not in {"codeepneat", "neat", "omnivore"} and "architecture" in changed:
            points = 2 ** (bits or 1) * (2**bits if "space" in changed else 1)
            assert len(simulated.trials) <= points
