"""The methods as Tune's searchers and schedulers: to the end, restored in the middle, and what is refused."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ray.tune.experiment import Trial
from ray.tune.search import ConcurrencyLimiter, Repeater
from ray.tune.search.searcher import Searcher

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.search.methods.base import Continue, Decision, Finished, Method, Pause, Proposal, Report, Stop
from orchestray.search.spaces.architectures.memory_bank import MemoryBank
from orchestray.search.spaces.dimensions import from_units
from orchestray.search.tune.scheduler import tune_scheduler
from orchestray.search.tune.searcher import MethodSearcher, tune_searcher
from support.method_cases import CASES, NUMBERS, Case, small_cell
from support.tune_loop import State, TuneLoop

PROGRAMS = {"enas", "darts", "smash"}
OTHERS = sorted(CASES.keys() - PROGRAMS)
STEERS = {"asha", "median_stopping", "learning_curve", "omnivore", "large_scale_evolution",
          "population_based_training", "population_based_training, t-test",
          "population_based_training, synchronous"}  # fmt: skip
"""Cases that stop or hold trials on their way, or hand their states on."""
POPULATIONS = [name for name in OTHERS if CASES[name].method == "population_based_training"]


def searcher_of(case: Case, **changed: Any) -> MethodSearcher:
    def make() -> Any:
        return case.make(**changed)

    return MethodSearcher(make, metric="score", time="training_iteration")


@functools.cache
def whole(name: str) -> TuneLoop:
    """Return a search that went through."""
    return TuneLoop(searcher_of(CASES[name])).run()


def as_json(loop: TuneLoop) -> list[str]:
    return [json.dumps(config, sort_keys=True) for config in loop.configs]


def check_trials(loop: TuneLoop) -> None:
    """Check that every trial has ended where its method says, from the states that it says."""
    session = loop.searcher.session
    assert session.is_done
    for number, standing in session.trials.items():
        assert standing.ended is not None
        assert standing.ended.status in ("succeeded", "stopped")
        assert (standing.step >= session.budget(number)) == (standing.ended.status == "succeeded")


@pytest.mark.parametrize("name", OTHERS)
def test_every_method_comes_to_its_end_in_a_tuner_with_the_keys_of_its_space(name: str) -> None:
    loop, case = whole(name), CASES[name]
    check_trials(loop)
    assert loop.searcher.suggest("one more") == Searcher.FINISHED
    for proposed, standing in zip(loop.configs, loop.searcher.session.trials.values(), strict=True):
        keys = {*case.space, *({} if case.architecture is None else {"genome"})}
        assert proposed.keys() == keys | ({"inherits"} if standing.proposal.inherits else set())
        assert {key: proposed[key] for key in case.space} == standing.proposal.changes


@pytest.mark.parametrize("name", OTHERS)
def test_without_a_scheduler_a_method_that_steers_says_so_and_any_other_comes_to_its_end(name: str) -> None:
    loop = TuneLoop(searcher_of(CASES[name]), is_scheduled=False)
    if name in STEERS:
        with pytest.raises(ConfigError, match=f"^{CASES[name].method} .*scheduler=tune_scheduler"):
            loop.run()
        return
    check_trials(loop.run())


@pytest.mark.parametrize("stride", [4, 5, 7])
@pytest.mark.parametrize("name", sorted(STEERS))
def test_a_method_that_steers_comes_to_its_end_whichever_steps_the_trials_report_at(name: str, stride: int) -> None:
    check_trials(TuneLoop(searcher_of(CASES[name]), stride=stride).run())


@pytest.mark.parametrize("name", OTHERS)
def test_a_searcher_saved_in_the_middle_and_restored_proposes_the_same(name: str, tmp_path: Path) -> None:
    loop = TuneLoop(searcher_of(CASES[name])).run(events=whole(name).num_events // 2)
    assert loop.configs
    assert not loop.is_over
    loop.searcher.save(str(tmp_path / "saved"))
    again = searcher_of(CASES[name])
    again.restore(str(tmp_path / "saved"))
    loop.restore(again).run()
    check_trials(loop)
    assert as_json(loop) == as_json(whole(name))
    assert [standing.score for standing in again.session.trials.values()] == [
        standing.score for standing in whole(name).searcher.session.trials.values()
    ]


@pytest.mark.parametrize("events", [25, 40])
@pytest.mark.parametrize("name", sorted(STEERS))
def test_a_restored_tuner_that_begins_what_was_held_comes_to_the_end_all_the_same(
    name: str, events: int, tmp_path: Path
) -> None:
    loop = TuneLoop(searcher_of(CASES[name])).run(events=events)
    loop.searcher.save(str(tmp_path / "saved"))
    again = searcher_of(CASES[name])
    again.restore(str(tmp_path / "saved"))
    check_trials(loop.restore(again, begins_all=True).run())


@pytest.mark.parametrize("events", [5, 25, 40])
@pytest.mark.parametrize("is_newer", [True, False], ids=["the searcher's file", "Tune's file"])
@pytest.mark.parametrize("name", OTHERS)
def test_whichever_file_is_newer_after_a_kill_no_trial_is_lost_or_trained_as_another(
    name: str, is_newer: bool, events: int, tmp_path: Path
) -> None:
    loop = TuneLoop(searcher_of(CASES[name])).run(events=1)
    if is_newer:
        known = list(loop.trials)
        loop.run(min(events, whole(name).num_events // 2))
        loop.trials = known
    loop.searcher.save(str(tmp_path / "saved"))
    if not is_newer:
        loop.run(3)
    again = searcher_of(CASES[name])
    again.restore(str(tmp_path / "saved"))
    loop.restore(again, begins_all=True).run()
    assert again.session.is_done
    shown = {again.numbers[trial.trial_id] for trial in loop.trials if trial.trial_id in again.numbers}
    for number, standing in again.session.trials.items():
        assert standing.ended is not None
        if again.session.method.hands_on and standing.num_reports:  # its state may have been taken from a lost one
            continue
        assert number in shown
        assert standing.ended.status in ("succeeded", "stopped")


@pytest.mark.parametrize("known", [1, 2])
@pytest.mark.parametrize("counts_all", [True, False], ids=["num_samples", "-1"])
def test_trials_that_only_the_searchers_file_knows_are_trained_though_all_had_ended(
    counts_all: bool, known: int, tmp_path: Path
) -> None:
    ended = whole("asha")
    most = len(ended.trials) if counts_all else math.inf
    loop = TuneLoop(searcher_of(CASES["asha"]), most=most).run()
    loop.searcher.save(str(tmp_path / "saved"))
    loop.trials = loop.trials[:known]
    again = searcher_of(CASES["asha"])
    again.restore(str(tmp_path / "saved"))
    loop.restore(again).run()
    assert [trial.config for trial in loop.trials] == [trial.config for trial in ended.trials]
    assert [trial.last_result["training_iteration"] for trial in loop.trials] == [
        trial.last_result["training_iteration"] for trial in ended.trials
    ]


class Watched(TuneLoop):
    """A loop that checks each trial that gets a process: it is what its method takes it for."""

    num_taken = 0

    def _begin(self, trial: Any) -> None:
        super()._begin(trial)
        number = self.searcher.numbers[trial.trial_id]
        standing, state = self.searcher.session.trials[number], self.begun_from[number][-1]
        assert state == State(standing.step, standing.at)
        assert {key: trial.config[key] for key in standing.changes} == standing.changes
        self.num_taken += state.at is not None and state.at[0] != number


@pytest.mark.parametrize("name", [*POPULATIONS, "omnivore"])
def test_a_trial_that_becomes_another_goes_on_from_the_very_state_that_its_method_means(name: str) -> None:
    num_taken = 0
    for seed in range(5):
        loop = Watched(searcher_of(CASES[name], seed=seed)).run()
        check_trials(loop)
        num_taken += loop.num_taken
    assert num_taken


@pytest.mark.parametrize("name", [*POPULATIONS, "omnivore"])
def test_so_does_one_in_a_tuner_that_was_restored_whenever_that_was(name: str, tmp_path: Path) -> None:
    for events in range(1, whole(name).num_events, 2):
        loop = Watched(searcher_of(CASES[name])).run(events)
        loop.searcher.save(str(tmp_path / "saved"))
        again = searcher_of(CASES[name])
        again.restore(str(tmp_path / "saved"))
        check_trials(loop.restore(again).run())


def test_a_child_is_given_the_checkpoint_that_its_parent_left_at_its_end() -> None:
    loop = whole("large_scale_evolution")
    budget, heirs = CASES["large_scale_evolution"].steps, 0
    for number, standing in loop.searcher.session.trials.items():
        proposal = standing.proposal
        assert loop.begun_from[number][0] == State(), "it is a trial of its own, from its first step"
        if proposal.inherits:
            assert proposal.parent is not None
            heirs += 1
            left = loop.searcher.session.trials[proposal.parent]
            assert loop.state_at(loop.configs[number]["inherits"]) == State(budget, (proposal.parent, left.num_reports))
    assert heirs


def test_a_parent_that_has_left_no_checkpoint_is_named_and_nobody_starts_afresh_without_a_word() -> None:
    loop = TuneLoop(searcher_of(CASES["large_scale_evolution"]), saves=False)
    with pytest.raises(ConfigError, match=r"weights of trial \d+, which has left no checkpoint.*inherit_weights=False"):
        loop.run()


@pytest.mark.parametrize("name", ["omnivore", "population_based_training"])
def test_a_trial_that_cannot_take_the_state_of_another_is_not_begun_again_without_a_word(name: str) -> None:
    with pytest.raises(TrainingError, match="has saved no checkpoint"):
        TuneLoop(searcher_of(CASES[name]), saves=False).run()


@pytest.mark.parametrize("name", POPULATIONS)
def test_a_member_that_fails_is_replaced_and_nobody_waits_for_it_for_ever(name: str) -> None:
    loop = TuneLoop(searcher_of(CASES[name]), fails=(1, 2)).run()
    ends = {number: standing.ended for number, standing in loop.searcher.session.trials.items()}
    assert all(end is not None and (end.status == "failed") == (number == 1) for number, end in ends.items())
    assert len(ends) == 7


@pytest.mark.parametrize("name", ["random", "median_stopping", "asha", "population_based_training"])
def test_a_trial_that_had_failed_and_that_tune_restarts_is_trained_to_its_end(name: str, tmp_path: Path) -> None:
    loop, again = TuneLoop(searcher_of(CASES[name]), fails=(1, 2)).run(), searcher_of(CASES[name])
    loop.searcher.save(str(tmp_path / "saved"))
    again.restore(str(tmp_path / "saved"))
    (failed,) = [trial for trial in loop.trials if trial.status == Trial.ERROR]
    failed.set_status(Trial.PENDING)  # as `Tuner.restore(..., restart_errored=True)` has it
    loop.fails = None
    loop.restore(again).run()
    assert failed.last_result["training_iteration"] == again.session.budget(1)


@pytest.mark.parametrize("name", ["asha", "omnivore", "population_based_training"])
def test_trials_that_are_held_for_others_that_tune_never_starts_are_no_endless_wait(name: str) -> None:
    loop = TuneLoop(searcher_of(CASES[name]), running=2, most_live=2)
    with pytest.raises(TrainingError, match=r"All 2 trials are held.*max_concurrent_trials"):
        loop.run()


class Holding(Method):
    """A method that holds each of its trials after a step; none is proposed beside them."""

    def __init__(self, num_trials: int, *, is_known: bool = True) -> None:
        """
        Args:
            num_trials: that there are.
            is_known: whether it says that there are no more.
        """
        super().__init__(space=NUMBERS, steps_per_trial=3)
        self.num_trials, self.is_known, self.num_asked = num_trials, is_known, 0
        self.due: list[tuple[int, Decision]] = []

    def ask(self) -> Proposal | None:
        if self.num_asked == self.num_trials:
            return None
        self.num_asked += 1
        return Proposal(self.num_asked - 1, from_units(self.space, [0.5, 0.5]))

    def next_report(self, trial: int, step: int) -> int:
        return step + 1

    def report(self, report: Report) -> Decision:
        return Pause()

    def tell(self, finished: Finished) -> None: ...

    def released(self) -> Sequence[tuple[int, Decision]]:
        due, self.due = self.due, []
        return due

    @property
    def is_done(self) -> bool:
        return self.is_known and self.num_asked == self.num_trials


@pytest.mark.parametrize(("is_known", "most"), [(True, math.inf), (False, math.inf), (True, 2)])
def test_a_method_that_holds_all_and_proposes_nothing_is_stuck_and_no_endless_wait(is_known: bool, most: float) -> None:
    searcher = MethodSearcher(lambda: Holding(2, is_known=is_known), metric="score", time="training_iteration")
    with pytest.raises(TrainingError, match=r"Holding holds all 2 trials and proposes no others; it is stuck"):
        TuneLoop(searcher, most=most).run()


class OneByOne(Holding):
    """A method that holds all, and at the end of each lets the one before it go: the first trains on."""

    num_held = 0

    def report(self, report: Report) -> Decision:
        self.num_held += 1
        if self.num_held == self.num_trials:
            self.due = [(self.num_trials - 1, Stop("it was the last"))]
        return Pause() if report.step == 1 else Continue()

    def tell(self, finished: Finished) -> None:
        if finished.trial > 0:
            self.due = [(finished.trial - 1, Stop("so did the one after it") if finished.trial > 1 else Continue())]


def test_trials_whose_ends_let_each_other_go_one_by_one_are_no_endless_wait() -> None:
    loop = TuneLoop(MethodSearcher(lambda: OneByOne(4), metric="score", time="training_iteration")).run()
    check_trials(loop)
    ends = [standing.ended.status for standing in loop.searcher.session.trials.values() if standing.ended]
    assert ends == ["succeeded", "stopped", "stopped", "stopped"]


@pytest.mark.parametrize("name", CASES)
def test_a_method_says_that_it_has_programs_if_and_only_if_it_proposes_one(name: str) -> None:
    method = CASES[name].make()
    proposal = method.ask()
    assert proposal is not None
    assert method.has_program == (proposal.program is not None) == (name in PROGRAMS)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_method_that_trains_one_program_itself_is_no_searcher(name: str) -> None:
    space = MemoryBank() if name == "smash" else small_cell()
    with pytest.raises(ConfigError, match=f"^{name} trains all its candidates by itself.*`orchestray search`"):
        tune_searcher(name, {}, architecture=space, metric="score", trials=4)


def test_a_packed_population_is_no_searcher() -> None:
    arguments: dict[str, Any] = {"population": 4, "steps_per_trial": 12, "interval_steps": 3, "metric": "score"}
    with pytest.raises(ConfigError, match=r"population_based_training with packed: .*`orchestray search`"):
        tune_searcher("population_based_training", NUMBERS, packed=True, **arguments)
    tune_searcher("population_based_training", NUMBERS, packed=False, **arguments)


@pytest.mark.parametrize("name", OTHERS)
def test_checkpoints_are_made_where_trials_take_the_states_of_others_and_nowhere_else(name: str) -> None:
    searcher = searcher_of(CASES[name])
    assert tune_scheduler(searcher)._saves_reports == searcher.session.method.hands_on
    assert searcher.session.method.hands_on == (name in {*POPULATIONS, "omnivore", "large_scale_evolution"})


class Diverging(TuneLoop):
    """A loop in which the score of every third trial is NaN."""

    def _decide(self, trial: Any, result: dict[str, Any]) -> str:
        if self.searcher.numbers[trial.trial_id] % 3 == 1:
            result["score"] = math.nan
        return super()._decide(trial, result)


@pytest.mark.parametrize("name", OTHERS)
def test_a_result_that_is_no_number_is_the_worst_there_is_for_every_method(name: str) -> None:
    loop = Diverging(searcher_of(CASES[name])).run()
    reports = [entry["report"] for entry in loop.searcher.journal.entries() if entry["call"] == "report"]
    assert {report["score"] for report in reports if report["trial"] % 3 == 1} == {-math.inf}
    for number, standing in loop.searcher.session.trials.items():
        assert standing.ended is not None
        is_stopped_alone = isinstance(standing.decision, Stop) and standing.decision.reason == "it has diverged"
        assert number % 3 == 1 or not is_stopped_alone


def test_the_mean_that_a_repeater_gives_without_a_time_is_the_score_of_its_trials() -> None:
    searcher = tune_searcher("random", NUMBERS, metric="score", trials=2, steps_per_trial=5)
    repeated: Any = Repeater(searcher, repeat=2)
    for trial, score in (("a", 1.0), ("b", 2.0)):
        repeated.suggest(trial)
        repeated.on_trial_complete(trial, {"score": score, "training_iteration": 5})
    assert searcher.session.trials[0].ended is not None
    assert searcher.session.trials[0].ended.score == 1.5


def test_a_result_that_comes_again_and_an_end_that_is_told_twice_count_once() -> None:
    searcher = tune_searcher("random", NUMBERS, metric="score", trials=1, steps_per_trial=2)
    searcher.suggest("a")
    result = {"score": 0.5, "training_iteration": 2}
    for _ in range(2):
        searcher.on_trial_result("a", dict(result))
    for _ in range(2):
        searcher.on_trial_complete("a", dict(result))
    assert [entry["call"] for entry in searcher.journal.entries()] == ["ask", "report", "tell"]


def test_the_last_result_of_a_trial_that_failed_is_no_report() -> None:
    searcher = tune_searcher("random", NUMBERS, metric="score", trials=1, steps_per_trial=9)
    searcher.suggest("a")
    searcher.on_trial_complete("a", {"score": 0.5, "training_iteration": 4}, error=True)
    end = searcher.session.trials[0].ended
    assert end is not None
    assert (end.status, end.score, end.error) == ("failed", None, "the trial failed")


def test_a_trial_that_ends_before_its_budget_is_told_with_its_last_result() -> None:
    searcher = tune_searcher("random", NUMBERS, metric="score", trials=1, steps_per_trial=9)
    searcher.suggest("a")
    searcher.on_trial_complete("a", {"score": 0.5, "training_iteration": 4})
    end = searcher.session.trials[0].ended
    assert end is not None
    assert (end.status, end.score, end.step) == ("succeeded", 0.5, 4)


def test_the_proposals_of_a_method_around_another_are_random_where_they_name_no_type() -> None:
    searcher = tune_searcher(
        "asha", NUMBERS, metric="score", trials=4, steps_per_trial=8, proposals={"sequence": "sobol"}
    )
    assert type(searcher.session.method.proposer).__name__ == "Random"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="sequenze"):
        tune_searcher("asha", NUMBERS, metric="score", steps_per_trial=8, proposals={"sequenze": "sobol"})


@pytest.mark.parametrize("value", [None, "high", [1.0], {"mean": 1.0}])
def test_a_metric_that_is_no_number_is_an_error_with_its_name_and_value(value: Any) -> None:
    searcher = tune_searcher("random", NUMBERS, metric="score", trials=2)
    searcher.suggest("a")
    with pytest.raises(ConfigError, match=r"report 'score' as .*: it must be a number"):
        searcher.on_trial_result("a", {"score": value, "training_iteration": 1})


def test_a_searcher_in_place_of_the_name_of_a_method_is_refused() -> None:
    searcher: Any = tune_searcher("random", NUMBERS, metric="score", trials=2)
    for given in (searcher, ConcurrencyLimiter(searcher, max_concurrent=2)):
        with pytest.raises(ConfigError, match="type: must be the name of a method, got <"):
            tune_searcher(given, NUMBERS, metric="score")


@pytest.mark.parametrize(("metric", "mode"), [("loss", "min"), ("accuracy", "max"), ("height", "max")])
def test_the_name_of_a_metric_says_its_direction_where_no_mode_is_given(metric: str, mode: str) -> None:
    searcher = tune_searcher("random", NUMBERS, metric=metric, trials=2)
    assert searcher.mode == searcher.objective.mode == mode


def test_a_tuner_that_wants_the_opposite_of_its_searcher_is_refused() -> None:
    searcher = tune_searcher("random", NUMBERS, metric="score", mode="max", trials=2)
    scheduler = tune_scheduler(searcher)
    for accepts in (functools.partial(searcher.set_search_properties, config={}), scheduler.set_search_properties):
        accepts("score", "max")
        accepts(None, None)
        for metric, mode in (("score", "min"), ("loss", "max")):
            with pytest.raises(
                ConfigError, match=r"the TuneConfig has metric=.*the searcher metric='score', mode='max'"
            ):
                accepts(metric, mode)


def test_another_space_beside_the_searchers_is_left_to_tune_to_refuse() -> None:
    searcher = tune_searcher("random", NUMBERS, metric="score", trials=2)
    assert not searcher.set_search_properties("score", "max", {"width": 3})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"initail": 3}, "did you mean 'initial'"),
        ({"model": "tpee"}, "did you mean 'tpe'"),
        ({"mode": "minimize"}, "must be max or min"),
        ({"space": {"width": 3}}, "space.width: must be a dimension"),
    ],
)
def test_an_argument_that_a_search_would_do_without_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tune_searcher("bayesian", **{"space": NUMBERS, "metric": "score", "trials": 4, **arguments})


def test_a_trial_that_only_tune_knows_is_known_again_beside_constants_of_its_param_space() -> None:
    first, restored = (tune_searcher("random", NUMBERS, metric="score", trials=2) for _ in range(2))
    assert restored.adopt("a", {"width": 3, **first.suggest("a")}) == 0
    assert not restored.missing


def test_a_searcher_without_trials_left_is_refused_by_the_next_tuner() -> None:
    searcher = tune_searcher("random", NUMBERS, metric="score", trials=1)
    searcher.set_search_properties(None, None, {})
    searcher.suggest("a")
    with pytest.raises(ConfigError, match="has proposed all its 1 trials, to a Tuner before this one"):
        searcher.set_search_properties(None, None, {})


def test_a_trial_whose_only_report_is_at_epoch_0_has_its_score() -> None:
    searcher = tune_searcher("random", NUMBERS, metric="score", trials=1, time="epoch")
    searcher.suggest("a")
    result = {"score": 0.5, "epoch": 0}
    searcher.on_trial_result("a", result)
    searcher.on_trial_complete("a", result)
    assert searcher.session.trials[0].score == 0.5
