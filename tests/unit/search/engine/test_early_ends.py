"""Trials that a condition of their config ends before their last step: by what they end, and who takes them over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestray.search.engine.session import MemoryJournal
from orchestray.search.engine.trial_worker import TrialHost
from orchestray.search.methods.base import Exploit, Method, Pause
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.saved.run import load_run
from support.search_loop import Loop, make_config
from unit.search.engine.test_controller import Scripted

LR = "train.optimizer.lr"
SPACE = {LR: make_dimension("choice", values=[0.01, 0.03, 0.1, 0.3])}
STEPS = 12
AT_ONCE = {"until": {"metric": "loss", "value": 100.0, "mode": "min"}}
ON_THE_WAY = {"until": {"metric": "loss", "value": 0.66, "mode": "min"}}
IMPATIENT = {"early_stopping": {"metric": "accuracy", "patience": 1}}
METHODS: dict[str, dict[str, Any]] = {
    "asha": {"trials": 6, "eta": 2, "grace_steps": 1},
    "omnivore": {"every_steps": 4, "probe_steps": 2},
    "population_based_training": {"population": 4, "interval_steps": 3, "fraction": 0.5},
    "population_based_training, synchronous": {"population": 4, "interval_steps": 3, "synchronous": True},
}


def made(name: str) -> Method:
    return make_method(name.partition(",")[0], space=SPACE, steps_per_trial=STEPS, seed=2, **METHODS[name])


def ended_by(condition: dict[str, Any], *, trials: range = range(STEPS)) -> Callable[..., TrainConfig]:
    """Return what makes a config; those of these trials have the condition, and are validated after every step."""

    def make(changes: Any, genome: Any, steps: int, trial: int) -> TrainConfig:
        data = make_config(changes, genome, steps, trial).model_dump(mode="json")
        data["train"] |= {"validate_every_steps": 1, **(condition if trial in trials else {})}
        return load_train_config(data)

    return make


def run(loop: Loop) -> Loop:
    """Run a search to its end; one that never ends is an error."""
    for _ in range(200):
        if not loop.step():
            break
    assert loop.conductor.is_over
    return loop


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("condition", [AT_ONCE, ON_THE_WAY, IMPATIENT], ids=["at once", "on the way", "impatient"])
@pytest.mark.parametrize("name", METHODS)
def test_a_trial_that_a_condition_of_its_config_has_ended_ends_whatever_its_method_decides(
    loops: Any, name: str, condition: dict[str, Any], parallel: int
) -> None:
    loop = run(loops(made(name), make=ended_by(condition), parallel=parallel))
    steps: dict[int, list[int]] = {}
    for trial, step, _ in loop.records.reports:
        steps.setdefault(trial, []).append(step)
    for trial, line in loop.records.lines.items():
        assert line["status"] in ("succeeded", "stopped")
        assert line["steps"] == steps[trial][-1], "its values are those that it was trained with last"
    if condition is AT_ONCE:
        assert {tuple(each) for each in steps.values()} == {(1,)}
        trials = loop.conductor.session.trials
        assert {trial: line["config"] for trial, line in loop.records.lines.items()} == {
            trial: standing.proposal.changes for trial, standing in trials.items()
        }


@pytest.mark.parametrize("name", ["omnivore", "population_based_training, synchronous"])
def test_where_all_wait_for_all_the_outcome_with_such_ends_is_the_same_at_any_concurrency(
    loops: Any, name: str
) -> None:
    outcomes = []
    for parallel in (1, 2, 4):
        lines = run(loops(made(name), f"by-{parallel}", make=ended_by(ON_THE_WAY), parallel=parallel)).records.lines
        outcomes.append({trial: {**lines[trial], "seconds": 0} for trial in sorted(lines)})
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert any(line["status"] == "succeeded" and line["steps"] < STEPS for line in outcomes[0].values())


def test_an_end_of_the_trial_that_trains_on_ends_the_search_of_omnivore_also_where_the_others_are_to_copy_it(
    loops: Any,
) -> None:
    goal = {"until": {"metric": "loss", "value": 0.6, "mode": "min"}}
    lines = run(loops(made("omnivore"), make=ended_by(goal), parallel=2)).records.lines
    ends = [(line["status"], line["steps"]) for _, line in sorted(lines.items())]
    assert ends == [*[("stopped", 2)] * 3, ("succeeded", METHODS["omnivore"]["every_steps"])]


@pytest.mark.parametrize("name", METHODS)
def test_a_search_that_was_killed_before_it_had_recorded_such_an_end_records_it_when_it_goes_on(
    loops: Any, name: str
) -> None:
    first = loops(made(name), make=ended_by(AT_ONCE))
    while not first.records.lines:
        assert first.step()
    first.close()
    [*calls, last] = first.journal.entries()
    assert last["call"] == "tell"
    second = loops(made(name), make=ended_by(AT_ONCE), journal=MemoryJournal(calls))
    assert {**second.records.lines[0], "seconds": 0} == {**first.records.lines[0], "seconds": 0}
    assert run(second).records.reports[0][0] == 1, "the first trial reports no more"


def test_a_trial_that_takes_over_the_state_of_one_that_was_ended_trains_on(loops: Any) -> None:
    method = Scripted({(0, 2): Pause()}, released={0: Exploit(1, {LR: 0.3}, "copied 1")})
    loop = run(loops(method, make=ended_by(AT_ONCE, trials=range(1, 3)), parallel=3))
    steps = [(trial, step) for trial, step, _ in loop.records.reports]
    assert steps == [(0, 2), (1, 1), (2, 1), (0, 3), (0, 5), (0, 6)]
    assert loop.records.lines[0]["config"] == {LR: 0.3}
    assert loop.records.lines[0]["steps"] == 6


def test_the_run_of_the_best_says_by_which_condition_it_ended(loops: Any, tmp_path: Path) -> None:
    loop = run(loops(Scripted({}), make=ended_by(AT_ONCE)))
    host = TrialHost(loop.rules)  # it has not trained any of the trials
    host.leave_run(loop.conductor.order_for_best(loop.conductor.best()), str(tmp_path / "best"))
    host.close()
    result = load_run(tmp_path / "best").result
    assert (result["stopped_by"], result["steps"]) == ("until", 1)
