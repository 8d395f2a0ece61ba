"""Population-based training, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Exploit, Pause, Proposal, Report
from orchestray.search.methods.conditions import Conditions
from orchestray.search.methods.population.params import PopulationBasedTraining as Section
from orchestray.search.methods.population.pbt import PopulationBasedTraining
from orchestray.search.methods.space import Space
from orchestray.search.registry.methods import make_method
from orchestray.search.simulation.virtual_time import Simulated, simulate
from support.population_toy import CORNERS, EXPLORE, NUM_STEPS, SPACE, Toy
from support.replayed import replay

KEY = list(SPACE)[-1]


def made(**parameters: Any) -> PopulationBasedTraining:
    chosen = {"space": SPACE, "steps_per_trial": NUM_STEPS, "population": 4, "interval_steps": 5, **parameters}
    return PopulationBasedTraining(**chosen)


def copies(found: Simulated) -> list[Exploit]:
    """Return every copy that was made, in order."""
    there: list[Exploit] = []
    for call in found.calls:
        answers = [answer for _, answer in call.answer] if call.name == "released" else [call.answer]
        there += [answer for answer in answers if isinstance(answer, Exploit)]
    return there


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize(
    ("exploit", "parameters"),
    [
        ("truncation", {}),
        ("binary_tournament", {}),
        ("t_test", {"evaluations": 3, "p": 0.3, "interval_steps": 2}),  # few, as the scores have a trend
    ],
)
def test_every_rule_solves_the_papers_toy(exploit: str, parameters: dict[str, Any], synchronous: bool) -> None:
    chosen = {"exploit": exploit, "synchronous": synchronous, "initial": CORNERS, **EXPLORE, **parameters}
    best = [Toy().run(made(seed=seed, **chosen), workers=4).best.score or 0.0 for seed in range(9)]
    assert min(best) >= 1.15


def test_without_copies_the_toy_stays_where_grid_search_is() -> None:
    found = Toy().run(made(initial=CORNERS, interval_steps=NUM_STEPS - 1), workers=4)
    assert [trial.score for trial in found.trials.values()] == pytest.approx([0.39] * 4, abs=0.01)


def test_synchronous_generations_are_the_same_at_any_concurrency_and_speed() -> None:
    def run(workers: int, slow: int) -> tuple[list[Any], Any]:
        found = Toy().run(
            made(synchronous=True, explore="both", seed=3),
            workers=workers,
            seconds_per_step=lambda proposal: 1.0 + (proposal.trial == slow),
        )
        return [(trial.reports, dict(trial.proposal.changes)) for _, trial in sorted(found.trials.items())], copies(
            found
        )

    first = run(1, 0)
    assert made(synchronous=True).is_order_free
    assert run(4, 3) == first
    assert run(8, 1) == first
    assert first[1]


def test_members_that_outnumber_the_processes_take_turns_so_that_none_falls_behind() -> None:
    steps: dict[int, int] = dict.fromkeys(range(7), 0)
    widest = 0
    toy = Toy()

    def become(trial: int, decision: Exploit) -> None:
        toy.become(trial, decision)
        steps[trial] = steps[decision.source]

    def evaluate(proposal: Proposal, step: int) -> float:
        nonlocal widest
        steps[proposal.trial] = step
        widest = max(widest, max(steps.values()) - min(steps.values()))
        return toy.evaluate(proposal, step)

    method = made(population=7, seed=1, explore="both")
    found = simulate(method, evaluate, workers=3, on_become=become)
    assert widest <= 2 * method.interval_steps
    assert {trial.status for trial in found.trials.values()} == {"succeeded"}
    assert found.busy_s >= 0.95 * 3 * found.makespan_s - 3 * method.interval_steps


def test_nobody_waits_where_there_are_processes_enough() -> None:
    found = Toy().run(made(), workers=4)
    assert not any(isinstance(call.answer, Pause) for call in found.calls)


def test_a_member_whose_process_failed_is_replaced_by_a_copy_of_one_that_is_left() -> None:
    toy = Toy()

    def evaluate(proposal: Proposal, step: int) -> float:
        if proposal.trial == 2 and step >= 50:
            raise RuntimeError("killed")
        return toy.evaluate(proposal, step)

    for synchronous in (False, True):
        toy = Toy()
        method = made(synchronous=synchronous, trials=5)
        found = simulate(method, evaluate, workers=2, on_become=toy.become)
        assert sorted(found.trials) == [0, 1, 2, 3, 4]
        assert found.trials[2].status == "failed"
        (first_report, _), *others = found.trials[4].reports
        assert first_report == 0
        assert others[0][0] >= 45
        assert found.trials[4].step == NUM_STEPS
        assert method.is_done


def test_a_population_of_which_every_member_fails_ends() -> None:
    def fail(proposal: Proposal, step: int) -> float:
        raise RuntimeError("out of memory")

    for synchronous in (False, True):
        method = made(synchronous=synchronous)
        found = simulate(method, fail, workers=2)
        assert len(found.trials) == 4
        assert method.is_done


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("exploit", ["truncation", "binary_tournament"])
def test_a_population_whose_scores_fall_step_by_step_comes_to_its_end(exploit: str, workers: int) -> None:
    reports: list[int] = []

    def fall(proposal: Proposal, step: int) -> float:
        reports.append(step)
        if len(reports) > 2_000:
            pytest.fail("members hand an early state to each other for ever")
        return float(-step)

    method = made(exploit=exploit, steps_per_trial=40)
    found = simulate(method, fall, workers=workers)
    assert method.is_done
    assert {trial.status for trial in found.trials.values()} == {"succeeded"}
    assert len(reports) > 4 * 40 / 5  # copies have gone back


def test_who_is_copied_was_better_and_what_is_explored_comes_from_its_values() -> None:
    method = made(factors=(0.5, 2.0))
    for _ in range(4):
        method.ask()
    values = [dict(method.members[trial].changes) for trial in range(4)]
    for trial, score in [(0, 0.4), (1, 0.3), (2, 0.2)]:
        method.report(Report(trial, 5, score))
    decision = method.report(Report(3, 5, 0.1))
    assert isinstance(decision, Exploit)
    assert decision.source == 0
    for key, value in decision.changes.items():
        assert value in (values[0][key] * 0.5, min(values[0][key] * 2.0, 1.0))


def test_a_killed_search_goes_on_by_its_journal() -> None:
    for synchronous in (False, True):
        found = Toy().run(made(synchronous=synchronous, population=5), workers=2)
        replay(made(synchronous=synchronous, population=5), found.calls)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"trials": 3}, "population: 4 members are more than the 3 trials"),
        ({"space": {}}, "nothing to explore"),
        ({"interval_steps": NUM_STEPS}, "below steps_per_trial: 200"),
        ({"initial": [{"h.c": 1.0}]}, "h.c is no key of search.space"),
        ({"architecture": object()}, "regularized_evolution"),
        (
            {"packed": True, "space": Space(SPACE, Conditions({KEY: {next(iter(SPACE)): (0.5,)}}))},
            f"and {KEY} would be there for some only; take its when out .*, or use packed: false",
        ),
    ],
)
def test_what_does_not_fit_is_refused(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        made(**parameters)


def test_a_section_makes_the_method() -> None:
    section = Section(type="population_based_training", population=4, exploit="t_test")
    method = make_method(**section.model_dump(), space=SPACE, steps_per_trial=100, trials=8)
    assert isinstance(method, PopulationBasedTraining)


def test_a_copy_copies_what_its_source_was_before_the_source_became_another() -> None:
    method = made(synchronous=True, exploit="binary_tournament", population=5)
    for _ in range(5):
        method.ask()
    for trial in range(5):
        assert isinstance(method.report(Report(trial, 5, score=float(trial))), Pause)
    seen: set[int] = set()
    for trial, decision in method.released():
        if isinstance(decision, Exploit):
            assert decision.source not in seen
        seen.add(trial)
    assert seen == set(range(5))
