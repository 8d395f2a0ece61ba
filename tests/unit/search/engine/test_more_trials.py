"""A search that has ended is given more trials, whatever its method does with their number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.config.search.load import load_search_config
from orchestray.search.engine.director import Director, MemoryJournal, end_of
from orchestray.search.engine.going_on import director_of
from orchestray.search.methods.base import Report, Wait
from orchestray.search.methods.registry import make_method
from orchestray.search.spaces.dimensions import make_dimension
from support.search_configs import BASE, GOOD
from support.search_loop import Loop

SPACE = {"train.optimizer.lr": make_dimension("log_uniform", low=1e-3, high=3.0)}
CHAIN = {"architecture": {"space": "chain"}, "space": {}}


def config(method: Mapping[str, Any], trials: int, more: Mapping[str, Any]) -> Any:
    search = {**GOOD["search"], **more, "method": method, "budget": {"trials": trials, "steps_per_trial": 64}}
    return load_search_config({"name": "a", "base": BASE, "search": search})


def run(director: Director) -> None:
    """Trials report one after the other, each better than the one before, until none goes on."""
    is_stuck = False
    while not is_stuck:
        while director.ask() is not None:
            pass
        is_stuck = True
        for trial in director.live:
            if (end := end_of(director, trial)) is not None:
                director.tell(trial, end[0])
                is_stuck = False
        going_on = [trial for trial in director.live if not isinstance(director.trials[trial].decision, Wait)]
        if going_on:
            trial = going_on[0]
            director.report(Report(trial, director.next_report(trial), float(trial)))
            is_stuck = False
    assert director.is_done
    assert not director.live


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ({"type": "random"}, {}),
        ({"type": "asha", "eta": 2}, {}),
        ({"type": "asha", "eta": 2, "proposals": {"type": "particle_swarm", "population": 4}}, {}),
        ({"type": "q_learning"}, CHAIN),
    ],
)
def test_more_trials_are_allowed_again_and_again(method: dict[str, Any], more: dict[str, Any]) -> None:
    journal, before = MemoryJournal(), None
    for trials in (4, 8, 20):
        director = director_of(config(method, trials, more), journal, trials_before=before)
        run(director)
        assert len(director.trials) == trials
        before, journal = trials, MemoryJournal(journal.entries())
    num_calls = len(journal.entries())
    again = director_of(config(method, 20, more), journal, trials_before=20)
    assert [standing.proposal for standing in again.trials.values()] == [
        standing.proposal for standing in director.trials.values()
    ]
    assert len(journal.entries()) == num_calls


def test_further_children_of_a_finished_evolution_find_the_weights_of_their_parents(tmp_path: Path) -> None:
    def evolution(trials: int) -> Any:
        return make_method("large_scale_evolution", space=SPACE, population=3, trials=trials, steps_per_trial=2, seed=1)

    first = Loop(evolution(6), tmp_path)
    first.run()
    first.conductor.states.clear(first.conductor.best())
    living = len(first.conductor.director.method.parents())
    assert len(list(tmp_path.glob("trial-*"))) == living < 6
    second = Loop(evolution(6), tmp_path, journal=first.journal, records=first.records)
    second.conductor.director.allow(12)
    second.run()
    assert {line["status"] for line in second.records.lines.values()} == {"succeeded"}
    assert any(standing.proposal.inherits for standing in list(second.conductor.director.trials.values())[6:])
    first.close()
    second.close()
