"""The journal of a method that is repeated: what it cannot be repeated from is refused with a way out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from orchestray.search.engine.session import MemoryJournal, MethodSession, SearchError, end_of
from orchestray.search.methods.base import Exploit, Method, Observation, Report
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import make_dimension
from unit.search.engine.test_controller import LR, Scripted


def method() -> Method:
    return make_method("random", space={"lr": make_dimension("uniform", low=0.1, high=1.0)}, trials=2)


def journal() -> list[dict[str, Any]]:
    """Return the calls of a search whose first trial has ended."""
    session = MethodSession(method(), kept := MemoryJournal())
    session.ask()
    session.report(Report(0, 1, 0.5))
    session.tell(0, "succeeded")
    return kept.entries()


def test_a_journal_is_repeated_and_the_method_goes_on() -> None:
    session = MethodSession(method(), MemoryJournal(journal()))
    proposal = session.ask()
    assert proposal is not None
    assert proposal.trial == 1


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda calls: calls[1].pop("released"), r"line 2 .* \(report lacks released\)"),
        (lambda calls: calls.insert(1, {"call": "muse"}), r"line 2 .* \('muse' is no call; known are ask, allow, "),
        (lambda calls: calls[0].pop("call"), r"line 1 .* \(None is no call"),
        (lambda calls: calls[1]["report"].update(novel=1), r"line 2 .* \(report: TypeError: .*'novel'\)"),
        (lambda calls: calls[0].update(proposal=7), r"line 1 .* \(ask: TypeError"),
        (lambda calls: calls[1]["report"].update(trial=9), r"line 2 .* \(report: KeyError: 9\)"),
        (lambda calls: calls[0]["proposal"].pop("program"), r"line 1 .* \(ask: KeyError: 'program'\)"),
        (lambda calls: calls[0]["proposal"].update(changes={}), r"to call 1 .* has changed since\."),
    ],
)
def test_a_journal_that_cannot_be_repeated_is_refused_with_the_line_and_what_to_do(
    spoil: Callable[[list[dict[str, Any]]], object], why: str
) -> None:
    calls = journal()
    spoil(calls)
    way_out = r".*Go on with the version of orchestray that the search began with, or start a new search, .*learn_from"
    with pytest.raises(SearchError, match=f"(?s)^The search cannot go on: {why}{way_out}"):
        MethodSession(method(), MemoryJournal(calls))


@pytest.mark.parametrize("name", ["bayesian", "reinforce"])
@pytest.mark.parametrize("scale", [1e100, sys.float_info.max])
def test_a_method_proposes_the_same_however_large_the_score_of_a_failure_is(name: str, scale: float) -> None:
    def proposed(worst: float) -> list[Any]:
        space = {"lr": make_dimension("log_uniform", low=1e-5, high=1), "n": make_dimension("integer", low=1, high=8)}
        session = MethodSession(make_method(name, space=space, trials=24, steps_per_trial=1), MemoryJournal())
        while (proposal := session.ask()) is not None:
            score = -worst if proposal.changes["lr"] > 0.03 else -proposal.changes["lr"]
            session.report(Report(proposal.trial, 1, score, (score,)))
            assert session.trials[proposal.trial].score == score
            session.tell(proposal.trial, "succeeded")
        return [trial.proposal.changes for trial in session.trials.values()]

    for changes, expected in zip(proposed(scale), proposed(1e90), strict=True):
        assert changes == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_method_proposes_the_same_however_large_the_score_of_an_earlier_failure_is(is_repeated: bool) -> None:
    def proposed(worst: float) -> list[Any]:
        def made() -> Method:
            space = {"lr": make_dimension("uniform", low=0.0, high=1.0)}
            return make_method("bayesian", space=space, trials=3)

        session = MethodSession(made(), kept := MemoryJournal())
        lrs = [0.1 * number for number in range(11)]
        session.learn([Observation({"lr": lr}, None, -worst if lr > 0.5 else -lr) for lr in lrs])
        session = MethodSession(made(), kept) if is_repeated else session
        return [proposal.changes["lr"] for _ in range(3) if (proposal := session.ask()) is not None]

    assert proposed(sys.float_info.max) == pytest.approx(proposed(1e90), rel=1e-6)


@pytest.mark.parametrize("is_over", [False, True])
def test_values_that_a_method_gives_a_trial_are_its_own_unless_it_has_ended(is_over: bool) -> None:
    other = {LR: 0.3}
    session = MethodSession(Scripted({(0, 2): Exploit(1, other, "copied 1")}), kept := MemoryJournal())
    for _ in range(3):
        session.ask()
    before = dict(session.trials[0].changes)
    session.report(Report(1, 4, 0.9))
    session.report(Report(0, 2, 0.5), is_over=is_over)
    standing = session.trials[0]
    assert (standing.changes, standing.step) == ((before, 2) if is_over else (other, 4))
    assert len(standing.taken) == (not is_over)
    assert end_of(session, 0) == (("succeeded", None) if is_over else None)
    again = MethodSession(Scripted({(0, 2): Exploit(1, other, "copied 1")}), kept).trials[0]
    assert (again.changes, again.step, again.taken) == (standing.changes, standing.step, standing.taken)


def test_the_best_report_of_a_trial_is_the_first_of_its_best() -> None:
    session = MethodSession(Scripted({}), MemoryJournal())
    session.ask()
    for step, score, violation in ((1, 0.9, 0.5), (2, 0.2, 0.0), (3, 0.4, 0.0), (4, 0.4, 0.0), (5, 0.3, 0.0)):
        session.report(Report(0, step, score, violations=(violation,)))
    standing = session.trials[0]
    assert (standing.score, standing.best_step, standing.best_report, standing.violation) == (0.4, 3, 3, 0.0)


@pytest.mark.parametrize(("source", "origin"), [(1, (1, 1)), (0, None)])
def test_a_trial_takes_over_the_state_of_another_and_keeps_its_own_for_other_values(
    source: int, origin: tuple[int, int] | None
) -> None:
    session = MethodSession(Scripted({(0, 2): Exploit(source, {LR: 0.3}, "changed")}), MemoryJournal())
    for _ in range(3):
        session.ask()
    session.report(Report(1, 4, 0.9))
    session.report(Report(0, 2, 0.5))
    standing = session.trials[0]
    assert (standing.origin, standing.at, standing.changes) == (origin, origin or (0, 1), {LR: 0.3})
