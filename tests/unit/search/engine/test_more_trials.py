"""A search that has ended is given more trials, whatever its method does with their number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestray.search.config.load import load_search_config
from orchestray.search.engine.resume import session_of
from orchestray.search.engine.session import MemoryJournal, MethodSession, end_of
from orchestray.search.methods.base import Pause, Report
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import make_dimension
from support.search_configs import BASE, GOOD
from support.search_loop import Loop

SPACE = {"train.optimizer.lr": make_dimension("log_uniform", low=1e-3, high=3.0)}
CHAIN = {"architecture": {"space": "chain"}, "space": {}}


def config(method: Mapping[str, Any], trials: int, more: Mapping[str, Any]) -> Any:
    search = {**GOOD["search"], **more, "method": method, "budget": {"trials": trials, "steps_per_trial": 64}}
    return load_search_config({"name": "a", "base": BASE, "search": search})


def run(session: MethodSession) -> None:
    """Let trials report one after the other, each better than the one before, until none goes on."""
    is_stuck = False
    while not is_stuck:
        while session.ask() is not None:
            pass
        is_stuck = True
        for trial in session.live:
            if (end := end_of(session, trial)) is not None:
                session.tell(trial, end[0])
                is_stuck = False
        going_on = [trial for trial in session.live if not isinstance(session.trials[trial].decision, Pause)]
        if going_on:
            trial = going_on[0]
            session.report(Report(trial, session.next_report(trial), float(trial)))
            is_stuck = False
    assert session.is_done
    assert not session.live


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
        previous = None if before is None else config(method, before, more)
        session = session_of(config(method, trials, more), journal, previous=previous)
        run(session)
        assert len(session.trials) == trials
        before, journal = trials, MemoryJournal(journal.entries())
    num_calls = len(journal.entries())
    again = session_of(config(method, 20, more), journal, previous=config(method, 20, more))
    assert [standing.proposal for standing in again.trials.values()] == [
        standing.proposal for standing in session.trials.values()
    ]
    assert len(journal.entries()) == num_calls


def test_further_children_of_a_finished_evolution_find_the_weights_of_their_parents(tmp_path: Path) -> None:
    def evolution(trials: int) -> Any:
        return make_method("large_scale_evolution", space=SPACE, population=3, trials=trials, steps_per_trial=2, seed=1)

    first = Loop(evolution(6), tmp_path)
    first.run()
    first.conductor.states.clear(first.conductor.best())
    living = len(first.conductor.session.method.parents())
    assert len(list(tmp_path.glob("trial-*"))) == living < 6
    second = Loop(evolution(6), tmp_path, journal=first.journal, records=first.records)
    second.conductor.session.allow(12)
    second.run()
    assert {line["status"] for line in second.records.lines.values()} == {"succeeded"}
    assert any(standing.proposal.inherits for standing in list(second.conductor.session.trials.values())[6:])
    first.close()
    second.close()
