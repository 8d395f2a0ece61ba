"""Results of earlier searches and runs: read, given to the method, kept in the journal; spaces that become wider."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.config import yaml_text
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.directory import RunDirectory
from orchestray.search.config.load import dump_search_yaml
from orchestray.search.engine.earlier import check_earlier, earlier_trials
from orchestray.search.engine.resume import session_of
from orchestray.search.engine.session import MemoryJournal, MethodSession
from orchestray.search.methods.base import Report
from orchestray.search.results.schema import TrialLine
from orchestray.search.results.writer import SearchRecords
from orchestray.trainers.config.dump import dump_yaml
from support.search_configs import tiny_search

LR, MOMENTUM, TYPE = "train.optimizer.lr", "train.optimizer.momentum", "train.optimizer.type"
BEST = (0.3, 0.6)


def config(high: float = 1.0, **search: Any) -> Any:
    chosen = {
        "method": {"type": "bayesian", "initial": 6},
        "space": {
            LR: {"type": "uniform", "low": 0.001, "high": high},
            MOMENTUM: {"type": "uniform", "low": 0.0, "high": 0.95},
        },
        "budget": {"trials": 12, "steps_per_trial": 4},
        **search,
    }
    return tiny_search(optimizer={"type": "sgd", "lr": 0.1, "momentum": 0.9}, **chosen)


def score(changes: Any) -> float:
    return 1 - (changes[LR] - BEST[0]) ** 2 - (changes[MOMENTUM] - BEST[1]) ** 2


def run(session: MethodSession, num: int) -> list[Any]:
    """Run some trials, one after the other; return their values."""
    points = []
    for _ in range(num):
        proposal = session.ask()
        assert proposal is not None
        points.append(dict(proposal.changes))
        session.report(Report(proposal.trial, 4, score(proposal.changes)))
        session.tell(proposal.trial, "succeeded")
    return points


def optimizers(high: float = 0.95, types: tuple[str, ...] = ("sgd", "adamw"), **more: Any) -> dict[str, Any]:
    """Return a space in which only `sgd` has a momentum; further keys of its dimension replace that."""
    momentum = {"type": "uniform", "low": 0.0, "high": high, "when": {TYPE: "sgd"}, **more}
    return {TYPE: {"type": "choice", "values": list(types)}, MOMENTUM: momentum}


def ended(made: Any, directory: Path, points: list[dict[str, Any]]) -> Path:
    """Write a search whose trials have these values, and their rank as accuracy."""
    with SearchRecords.create(directory, "earlier") as records:
        records.write_config(dump_search_yaml(made))
        for trial, changes in enumerate(points):
            records.finished(TrialLine(trial, "succeeded", trial / len(points), changes))
    return directory / "earlier"


def proposed(session: MethodSession, num: int) -> list[dict[str, Any]]:
    """Return the values of some trials, which end one after the other with equal scores."""
    points = []
    for _ in range(num):
        proposal = session.ask()
        assert proposal is not None
        points.append(dict(proposal.changes))
        session.report(Report(proposal.trial, 4, 0.5))
        session.tell(proposal.trial, "succeeded")
    return points


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Write a search of 20 trials, of which one inside of the narrower space has failed."""
    made = config(high=2.0, method={"type": "random"}, budget={"trials": 20, "steps_per_trial": 4})
    with SearchRecords.create(tmp_path, "earlier") as records:
        records.write_config(dump_search_yaml(made))
        points = run(session_of(made, records.journal), 20)
        first = next(trial for trial, changes in enumerate(points) if changes[LR] < 1)
        for trial, changes in enumerate(points):
            failed = trial == first
            line = TrialLine(trial, "failed" if failed else "succeeded", None if failed else score(changes), changes)
            records.finished(line)
    return tmp_path / "earlier"


@pytest.mark.parametrize(
    "method",
    [
        {"type": "bayesian"},
        {"type": "bayesian", "model": "tpe", "initial": 4},
        {"type": "regularized_evolution", "population": 6},
        {"type": "hierarchical_evolution", "population": 6, "tournament_fraction": 0.5},
        {"type": "asha", "proposals": {"type": "bayesian"}, "grace_steps": 2},
    ],
)
def test_a_method_that_learns_begins_near_the_best_of_the_earlier_search(earlier: Path, method: dict[str, Any]) -> None:
    made = config(method=method, learn_from=str(earlier))
    session = session_of(made, MemoryJournal())
    first = [session.ask() for _ in range(3)]
    blind = session_of(config(method=method), MemoryJournal())
    uninformed = [blind.ask() for _ in range(3)]
    mean = [sum(score(proposal.changes) for proposal in those) / 3 for those in (first, uninformed)]
    assert mean[0] > mean[1] + 0.05


def test_points_outside_of_the_space_and_trials_without_a_value_are_counted_and_left_out(earlier: Path) -> None:
    made = config(learn_from=[str(earlier)])
    found = earlier_trials(made)
    assert all(one.changes[LR] <= 1.0 for one in found.observations)
    (note,) = found.notes
    with SearchRecords.open_existing(earlier.parent, "earlier") as records:
        lines = list(records.lines.values())
    outside = sum(line["config"][LR] > 1.0 for line in lines)
    assert 0 < outside < 19
    assert note == (
        f"search.learn_from: {len(found.observations)} of 20 trials of {earlier} are used; {outside} lie outside of "
        "search.space; 1 lack a value of the objective or of a bound"
    )
    assert check_earlier(made) == (note,)


def test_a_search_that_has_learnt_goes_on_with_the_same_bits_when_the_earlier_one_is_gone(earlier: Path) -> None:
    made, journal = config(learn_from=str(earlier)), MemoryJournal()
    points = run(session_of(made, journal), 4)
    shutil.rmtree(earlier)
    killed = MemoryJournal(journal.entries()[:-1])
    again = session_of(made, killed)
    assert [dict(one.changes) for one in again.trials.values()] == points
    again.tell(3, "succeeded")
    undisturbed = session_of(made, journal)
    assert run(again, 2) == run(undisturbed, 2)


def test_trials_of_another_length_are_used_with_a_warning(earlier: Path) -> None:
    (note,) = check_earlier(config(learn_from=earlier, budget={"trials": 9, "epochs_per_trial": 2}))
    assert note.endswith("its trials had 4 steps, and these have 2 epochs: scores may not compare")


def test_a_run_is_an_observation(tmp_path: Path) -> None:
    made = config(learn_from=str(tmp_path / "run"))
    with RunDirectory.create(tmp_path, "run") as directory:
        directory.write_config(dump_yaml(made.base))
        directory.write_result({"status": "succeeded", "final": {"validation": {"accuracy": 0.75, "loss": 0.5}}})
    (one,) = earlier_trials(made).observations
    assert (one.changes, one.score) == ({LR: 0.1, MOMENTUM: 0.9}, 0.75)


def test_bounds_are_learnt_with_the_scores(earlier: Path) -> None:
    made = config(objective={"metric": "accuracy", "subject_to": {"accuracy": {"min": 0.5}}}, learn_from=str(earlier))
    for one in earlier_trials(made).observations:
        assert one.violations == ((0.5 - score(one.changes)) / 0.5,)


def test_an_untrained_trial_is_learnt_as_such_by_its_bound_and_not_at_all_without(tmp_path: Path) -> None:
    bounded = {"metric": "accuracy", "subject_to": {"parameters": {"max": 100}}}
    with SearchRecords.create(tmp_path, "earlier") as records:
        records.write_config(dump_search_yaml(config(objective=bounded)))
        for trial, (steps, parameters) in enumerate(((4, 90), (0, 200))):
            more = {"constraints": {"parameters": parameters}, "feasible": parameters <= 100}
            point = {LR: 0.1 * (trial + 1), MOMENTUM: 0.5}
            records.finished(TrialLine(trial, "succeeded", 0.5, point, steps=steps, more=more))
    place = str(tmp_path / "earlier")
    found = earlier_trials(config(objective=bounded, learn_from=place)).observations
    assert [(one.is_trained, one.violations) for one in found] == [(True, (-0.1,)), (False, (1.0,))]
    wider = {**bounded, "subject_to": {"parameters": {"max": 300}}}
    for objective in (wider, {"metric": "accuracy"}):
        assert [
            one.is_trained for one in earlier_trials(config(objective=objective, learn_from=place)).observations
        ] == [True]


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ({"objective": {"metric": "loss"}}, "the objective of .* is accuracy .max., and this search's is loss .min."),
        ({"space": {LR: {"type": "uniform", "low": 0.1, "high": 1}}}, "they differ in train.optimizer.momentum"),
        ({"method": {"type": "random"}}, "is not for random, which cannot take in results of other trials"),
        ({"learn_from": "nowhere"}, "nowhere is not the directory of a search, or of a run that has ended"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(earlier: Path, search: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: search.learn_from: .*{expected}"):
        check_earlier(config(**{"learn_from": str(earlier), **search}), label="here")


@pytest.mark.parametrize(
    "method",
    [
        {"type": "random"},
        {"type": "random", "sequence": "sobol"},
        {"type": "bayesian", "initial": 3},
        {"type": "bayesian", "model": "tpe", "initial": 3},
        {"type": "regularized_evolution", "population": 12},
        {"type": "median_stopping"},
    ],
)
def test_a_resumed_search_goes_on_over_a_wider_space_and_can_be_resumed_again(method: dict[str, Any]) -> None:
    narrow = config(high=0.01, method=method, budget={"trials": 30, "steps_per_trial": 4})
    wide = config(high=1.0, method=method, budget={"trials": 30, "steps_per_trial": 4})
    journal = MemoryJournal()
    assert all(point[LR] <= 0.01 for point in run(session_of(narrow, journal), 5))
    after = run(session_of(wide, journal, previous=narrow), 15)
    assert max(point[LR] for point in after) > 0.01
    calls = journal.entries()
    for previous in (wide, narrow):  # a kill may have come before the config was written
        again = session_of(wide, MemoryJournal(calls), previous=previous)
        assert [dict(one.changes) for one in again.trials.values()][5:] == after
    with pytest.raises(ConfigError, match=r"may not change search.space.train.optimizer.lr \(was .* only become wider"):
        session_of(narrow, MemoryJournal(calls), previous=narrow)


def test_a_grid_cannot_become_wider_and_says_what_can_be_done() -> None:
    method = {"type": "grid", "points": {LR: 3, MOMENTUM: 3}}
    journal = MemoryJournal()
    run(session_of(config(high=0.5, method=method), journal), 2)
    num_calls = len(journal.entries())
    with pytest.raises(ConfigError, match=r"grid cannot go on over a wider space.*learn_from"):
        session_of(config(method=method), journal, previous=config(high=0.5, method=method))
    assert len(journal.entries()) == num_calls


def test_first_trials_are_completed_by_the_space_that_the_search_began_with() -> None:
    narrow = config(high=0.05, method={"type": "random"}, start=[{MOMENTUM: 0.5}])  # the base's rate, 0.1, is outside
    journal = MemoryJournal()
    (first,) = run(session_of(narrow, journal), 1)
    assert first[LR] <= 0.05
    session = session_of(config(method={"type": "random"}, start=[{MOMENTUM: 0.5}]), journal, previous=narrow)
    assert dict(session.trials[0].changes) == first


POINTS = [{TYPE: "adamw"}, *({TYPE: "sgd", MOMENTUM: 0.1 * place} for place in range(1, 9))]


@pytest.mark.parametrize(
    "method",
    [
        {"type": "bayesian", "initial": 4},
        {"type": "bayesian", "model": "tpe", "initial": 4},
        {"type": "regularized_evolution", "population": 6},
        {"type": "hierarchical_evolution", "population": 6},
    ],
)
def test_trials_are_learnt_with_the_keys_that_they_have(tmp_path: Path, method: dict[str, Any]) -> None:
    place = ended(config(space=optimizers()), tmp_path, POINTS)
    made = config(space=optimizers(), method=method, learn_from=str(place))
    assert [one.changes for one in earlier_trials(made).observations] == POINTS
    for point in proposed(session_of(made, MemoryJournal()), 6):
        assert (MOMENTUM in point) == (point[TYPE] == "sgd")


def test_trials_with_other_keys_than_a_point_of_the_space_or_that_the_base_refuses_are_left_out(tmp_path: Path) -> None:
    with_when, without = config(space=optimizers()), config(space=optimizers(types=("sgd", "rmsprop"), when={}))
    place = ended(with_when, tmp_path, [*POINTS, {TYPE: "adamw", MOMENTUM: 0.5}, {TYPE: "sgd"}])
    for space in (with_when.search.space, without.search.space):
        found = earlier_trials(config(space=space, learn_from=str(place)))
        expected = [point for point in POINTS if point[TYPE] == "sgd" or "adamw" in space[TYPE].values]
        assert [one.changes for one in found.observations] == expected
    refuses = config(space=optimizers(when={}), learn_from=str(place))
    assert [one.changes for one in earlier_trials(refuses).observations] == POINTS[1:]


def test_the_base_of_a_run_is_an_observation_without_the_keys_that_it_lacks(tmp_path: Path) -> None:
    made = config(space=optimizers(), learn_from=str(tmp_path / "run"))
    adamw = config(space={TYPE: optimizers()[TYPE]}, method={"type": "random"}).base
    optimizer = adamw.train.optimizer.model_dump() | {"type": "adamw"}
    optimizer = {key: value for key, value in optimizer.items() if key in ("type", "lr")}
    data = adamw.model_dump(mode="json")
    data["train"]["optimizer"] = optimizer
    with RunDirectory.create(tmp_path, "run") as directory:
        directory.write_config(yaml_text.write(data))
        directory.write_result({"status": "succeeded", "final": {"validation": {"accuracy": 0.75}}})
    assert [one.changes for one in earlier_trials(made).observations] == [{TYPE: "adamw"}]


def test_values_of_an_earlier_search_are_learnt_as_this_space_has_them(tmp_path: Path) -> None:
    place = ended(config(space={LR: {"type": "choice", "values": [1, 2]}}), tmp_path, [{LR: 1}, {LR: 2}])
    made = config(space={LR: {"type": "choice", "values": [2.0, 1.0, 0.5]}}, learn_from=str(place))
    assert [repr(one.changes[LR]) for one in earlier_trials(made).observations] == ["1.0", "2.0"]
    assert session_of(made, MemoryJournal()).ask() is not None


@pytest.mark.parametrize(
    "method",
    [
        {"type": "random"},
        {"type": "bayesian", "initial": 3},
        {"type": "bayesian", "model": "tpe", "initial": 3},
        {"type": "regularized_evolution", "population": 8},
        {"type": "population_based_training", "population": 14, "interval_steps": 2},
    ],
)
def test_a_wider_space_has_the_conditions_of_the_narrower_one(method: dict[str, Any]) -> None:
    budget = {"trials": 20, "steps_per_trial": 4}
    narrow, wide = (config(space=optimizers(high), method=method, budget=budget) for high in (0.2, 0.95))
    journal = MemoryJournal()
    proposed(session_of(narrow, journal), 4)
    session = session_of(wide, journal, previous=narrow)
    after = proposed(session, 10)
    assert all((MOMENTUM in point) == (point[TYPE] == "sgd") for point in after)
    assert max(point.get(MOMENTUM, 0) for point in after) > 0.2
    again = session_of(wide, MemoryJournal(journal.entries()), previous=narrow)
    assert [dict(one.changes) for one in again.trials.values()][4:] == after


def test_combinations_that_the_base_refuses_in_the_wider_space_only_are_left_out() -> None:
    narrow, wide = (
        config(
            space=optimizers(types=types, when={}),
            method={"type": "random"},
            budget={"trials": 20, "steps_per_trial": 4},
        )
        for types in (("sgd", "rmsprop"), ("sgd", "rmsprop", "adamw"))
    )
    journal = MemoryJournal()
    proposed(session_of(narrow, journal), 2)
    for point in proposed(session_of(wide, journal, previous=narrow), 18):
        assert point[TYPE] != "adamw", "it has no momentum"
