"""A search without Ray: reports, ends, states handed on, failures, and a search that was killed goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.errors import ConfigError
from orchestray.search.checkpoints.state_files import StateAt, StateFiles
from orchestray.search.engine.controller import SearchController
from orchestray.search.engine.messages import TrialResult, TrialTask
from orchestray.search.engine.objective import Objective, Objectives
from orchestray.search.engine.session import MemoryJournal, MethodSession, SearchError
from orchestray.search.methods.base import Continue, Decision, Exploit, Finished, Method, Pause, Proposal, Report, Stop
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.search.trials.program import TrialState
from support.search_loop import ACCURACY, MemoryRecords, begin, make_config

LR = "train.optimizer.lr"
SPACE = {LR: make_dimension("choice", values=[0.01, 0.03, 0.1, 0.3])}


def grid(**arguments: Any) -> Method:
    return make_method("grid", space=SPACE, steps_per_trial=6, **arguments)


class Scripted(Method):
    """A method of three trials that report every two steps; a table holds its decisions, once each."""

    def __init__(self, decisions: dict[tuple[int, int], Decision], *, released: dict[int, Decision] | None = None):
        super().__init__(space=SPACE, steps_per_trial=6)
        self.decisions, self.to_release = dict(decisions), released or {}
        self.asked = 0
        self.heard: list[tuple[int, int]] = []
        self.told: list[Finished] = []
        self.waiting: set[int] = set()

    def ask(self) -> Proposal | None:
        if self.is_done:
            return None
        self.asked += 1
        return Proposal(self.asked - 1, {LR: [0.01, 0.03, 0.1][self.asked - 1]})

    def next_report(self, trial: int, step: int) -> int:
        return step + 2

    def report(self, report: Report) -> Decision:
        self.heard.append((report.trial, report.step))
        decision = self.decisions.pop((report.trial, report.step), Continue())
        if isinstance(decision, Pause):
            self.waiting.add(report.trial)
        return decision

    def tell(self, finished: Finished) -> None:
        self.told.append(finished)

    def released(self) -> Sequence[tuple[int, Decision]]:
        due = [trial for trial in sorted(self.waiting) if len(self.told) >= 2]
        self.waiting -= set(due)
        return [(trial, self.to_release.get(trial, Continue())) for trial in due]

    @property
    def hands_on(self) -> bool:
        return True

    @property
    def is_done(self) -> bool:
        return self.asked == 3


@pytest.mark.parametrize("parallel", [1, 3])
def test_every_point_of_a_grid_is_trained_once_and_the_best_is_kept(loops: Any, parallel: int) -> None:
    loop = loops(grid(), parallel=parallel).run()
    lines = loop.records.lines
    assert [lines[trial]["config"][LR] for trial in sorted(lines)] == [0.01, 0.03, 0.1, 0.3]
    assert {line["status"] for line in lines.values()} == {"succeeded"}
    best = loop.conductor.best()
    assert best is not None
    assert best.score == max(line["objective"] for line in lines.values())
    assert best.trial == min(trial for trial, line in lines.items() if line["objective"] == best.score)


@pytest.mark.parametrize("stopped_by", [None, "asha", "median_stopping", "learning_curve"])
def test_the_run_of_the_best_has_its_weights(loops: Any, tmp_path: Path, stopped_by: str | None) -> None:
    from orchestray.trainers.saved.run import load_run

    stopping = {"space": SPACE, "steps_per_trial": 6, "trials": 4, "proposals": {"type": "grid"}}
    loop = loops(grid() if stopped_by is None else make_method(stopped_by, **stopping)).run()
    kept = loop.conductor.best()
    told = loop.hosts[0].leave_run(loop.conductor.order_for_best(kept), str(tmp_path / "best"))
    assert told.error is None
    run = load_run(tmp_path / "best")
    task, model = run.load_task(), run.load_model()
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        measured = task.metrics(model.eval()(batch["inputs"]), batch)["accuracy"]
    assert float(measured) == pytest.approx(loop.records.lines[kept.trial]["objective"], abs=1e-12)


def test_a_trial_becomes_another_with_its_very_bytes(loops: Any) -> None:
    method = Scripted({(0, 4): Exploit(1, {LR: 0.3}, "copied 1")})
    loop = loops(method, parallel=3)
    while (0, 4) not in method.heard:
        loop.step()
    source, step = loop.conductor.session.trials[0].origin, loop.conductor.session.trials[1].step
    order = loop.orders[0]
    assert order.config.train.optimizer.lr == 0.3
    loop.hosts[0]._change(order)
    held = loop.files.read(StateAt(*source))
    clone = loop.hosts[0]._program.state()
    for name, tensor in held.tensors.items():
        assert torch.equal(clone.tensors[name], tensor), name
    loop.run()
    assert source[0] == 1
    assert (0, 1, step, "copied 1") in loop.records.nodes
    assert loop.records.lines[0]["config"] == {LR: 0.3}


def test_a_stopped_trial_is_trained_no_further(loops: Any) -> None:
    loop = loops(Scripted({(1, 2): Stop("hopeless")})).run()
    line = loop.records.lines[1]
    assert (line["status"], line["steps"], line["reason"]) == ("stopped", 2, "hopeless")
    assert [step for trial, step, _ in loop.records.reports if trial == 1] == [2]


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_trial_that_waits_gives_its_process_away_and_goes_on_later(loops: Any, parallel: int) -> None:
    loop = loops(Scripted({(0, 2): Pause()}), parallel=parallel).run()
    assert loop.records.lines[0]["steps"] == 6
    whole = loops(Scripted({}), "whole").run()
    assert loop.records.lines[0]["objective"] == whole.records.lines[0]["objective"]
    assert [report for report in loop.records.reports if report[0] == 0] == [
        report for report in whole.records.reports if report[0] == 0
    ]


def test_a_trial_that_fails_is_recorded_and_the_search_goes_on(loops: Any) -> None:
    def make(changes: Any, genome: Any, steps: int, trial: int) -> Any:
        config = make_config(changes, genome, steps, trial)
        task = config.task.model_copy(update={"nan_at": 3}) if trial == 1 else config.task
        return config.model_copy(update={"task": task})

    loop = loops(grid(), make=make).run()
    assert loop.records.lines[1]["status"] == "failed"
    assert loop.records.lines[1]["objective"] is None
    assert "loss" in loop.records.lines[1]["error"]
    assert [loop.records.lines[trial]["status"] for trial in (0, 2, 3)] == ["succeeded"] * 3


def test_a_search_whose_first_trials_all_fail_ends_with_the_first_error(loops: Any) -> None:
    def make(changes: Any, genome: Any, steps: int, trial: int) -> Any:
        raise ConfigError(f"config {trial} is impossible")

    with pytest.raises(SearchError, match="config 0 is impossible"):
        loops(grid(), make=make).run()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_trial_that_is_to_become_what_makes_no_config_fails_alone(loops: Any, is_killed: bool) -> None:
    def make(changes: Any, genome: Any, steps: int, trial: int) -> Any:
        if changes[LR] == 0.5:
            raise ConfigError("a rate of 0.5 is impossible")
        return make_config(changes, genome, steps, trial)

    def script() -> Method:
        return Scripted({(1, 2): Exploit(1, {LR: 0.5}, "perturbed")})

    loop = loops(script(), make=make, parallel=2)
    while 1 not in loop.records.lines:
        loop.step()
    if is_killed:
        for host in loop.hosts:
            host._saver.submit(lambda: None).result()
        journal = MemoryJournal(loop.journal.entries())
        loop = loops(script(), make=make, parallel=2, journal=journal, records=loop.records)
    lines = loop.run().records.lines
    assert {trial: line["status"] for trial, line in lines.items()} == {0: "succeeded", 1: "failed", 2: "succeeded"}
    assert lines[1]["error"] == "a rate of 0.5 is impossible"


def test_an_objective_that_nobody_reports_names_those_there_are(loops: Any) -> None:
    loop = loops(grid(), objectives=Objectives([Objective("acuracy")]))
    with pytest.raises(ConfigError, match="accuracy, loss, train_loss"):
        loop.run()


def test_less_is_better_where_the_mode_says_so(loops: Any) -> None:
    loop = loops(grid(), objectives=Objectives([Objective("loss", "min")])).run()
    best = loop.conductor.best()
    assert loop.records.lines[best.trial]["objective"] == min(line["objective"] for line in loop.records.lines.values())


@pytest.mark.parametrize("killed_after", range(1, 13, 2))
def test_a_search_that_was_killed_goes_on_as_if_not(loops: Any, killed_after: int) -> None:
    def script() -> Method:
        return Scripted(
            {(0, 2): Pause(), (1, 4): Exploit(2, {LR: 0.3}, "copied"), (2, 4): Exploit(2, {LR: 0.2}, "own")}
        )

    whole = loops(script(), "whole", parallel=2).run()
    first = loops(script(), parallel=2)
    for _ in range(killed_after):
        first.step()
    for host in first.hosts:
        host._saver.submit(lambda: None).result()
    second = loops(script(), parallel=2, journal=MemoryJournal(first.journal.entries()), records=first.records)
    second.run()
    assert sorted(second.records.lines) == [0, 1, 2]
    for trial, line in whole.records.lines.items():
        again = second.records.lines[trial]
        assert (again["status"], again["steps"], again["config"]) == (line["status"], line["steps"], line["config"])
        assert math.isfinite(again["objective"])


def test_a_journal_of_another_method_is_refused() -> None:
    journal = MemoryJournal()
    session = MethodSession(grid(), journal)
    session.ask()
    entries = journal.entries()
    entries[0]["proposal"]["changes"] = {LR: 0.5}
    with pytest.raises(SearchError, match="call 1 of its journal"):
        MethodSession(grid(), MemoryJournal(entries))


def test_the_time_limit_of_a_trial_ends_it_after_a_step(loops: Any) -> None:
    loop = loops(make_method("grid", space=SPACE, steps_per_trial=10**6, trials=1), time_limit_s=0.05).run()
    assert loop.records.lines[0]["status"] == "failed"
    assert "time limit of 0.05 s" in loop.records.lines[0]["error"]


def test_a_seed_gives_the_same_trials_and_the_same_best_one_at_a_time_and_eight_at_once(loops: Any) -> None:
    space = {LR: make_dimension("log_uniform", low=1e-4, high=1.0)}
    found = []
    for parallel in (1, 8):
        method = make_method("random", space=space, trials=10, steps_per_trial=4, seed=5)
        loop = loops(method, f"at-once-{parallel}", parallel=parallel).run()
        lines = loop.records.lines
        best = loop.conductor.best()
        found.append(({t: (lines[t]["config"], lines[t]["objective"]) for t in sorted(lines)}, best))
    assert found[0] == found[1]


@pytest.mark.parametrize("killed_after", range(5))
def test_a_grid_that_was_killed_loses_no_point_and_repeats_none(loops: Any, killed_after: int) -> None:
    whole = loops(grid(), "whole").run().records
    first = loops(grid())
    for _ in range(killed_after):
        first.step()
    second = loops(grid(), journal=MemoryJournal(first.journal.entries()), records=first.records).run().records
    assert second.reports == whole.reports
    assert {t: line["objective"] for t, line in second.lines.items()} == {
        t: line["objective"] for t, line in whole.lines.items()
    }


class Slow(Method):
    """A method whose trials report twice."""

    num_trials, asked = 5, 0

    def ask(self) -> Proposal | None:
        self.asked += 1
        return Proposal(self.asked - 1, {LR: 0.1})

    def next_report(self, trial: int, step: int) -> int:
        return step + 3

    def tell(self, finished: Finished) -> None: ...

    @property
    def is_done(self) -> bool:
        return self.asked == self.num_trials


def answer(order: TrialTask, score: float | None) -> TrialResult:
    """Return the answer of a process; a score of None: the trial has failed."""
    if score is None:
        return TrialResult(order.trial, error="too late")
    is_written = order.bar is not None and score >= order.bar
    return TrialResult(order.trial, order.until, {"accuracy": score}, is_written=is_written)


def test_a_trial_that_ends_well_is_the_best_though_all_that_were_better_on_the_way_fail_later(tmp_path: Path) -> None:
    def conductor() -> SearchController:
        method = Slow(space=SPACE, steps_per_trial=6)
        return SearchController(
            MethodSession(method, journal), make_config, ACCURACY, records, StateFiles(tmp_path), parallel=5
        )

    journal, records = MemoryJournal(), MemoryRecords()
    search = conductor()
    files = search.states.files

    def hear(order: TrialTask, score: float | None) -> TrialTask | None:
        told = answer(order, score)
        if told.is_written:
            files.write(StateAt(told.trial, order.report), TrialState({"a": torch.zeros(1)}, {}))
        return search.receive(told)

    orders = [begin(search) for _ in range(5)]
    halfway = [hear(order, 0.9 - 0.1 * order.trial) for order in orders if order is not None]
    assert halfway[4] is not None
    hear(halfway[4], 0.3)  # ends well, behind all others
    for order in halfway[:4]:
        assert order is not None
        hear(order, None)
    assert search.is_over
    best = search.best()
    assert best is not None
    assert (best.trial, best.score, best.report) == (4, 0.5, 1)
    assert list(tmp_path.iterdir()) == [files.path(StateAt(4, 1))]
    again = conductor().best()
    assert again == best


def test_of_trials_that_have_ended_well_the_states_of_the_best_three_are_kept(loops: Any) -> None:
    space = {LR: make_dimension("log_uniform", low=1e-4, high=1.0)}
    loop = loops(make_method("random", space=space, trials=8, steps_per_trial=4, seed=5)).run()
    ranked = sorted(loop.records.lines.values(), key=lambda line: (-line["objective"], line["trial"]))
    assert loop.files.reports().keys() == {line["trial"] for line in ranked[:3]}


class Many(Slow):
    num_trials = 20


class Answered:
    """A search of twenty trials whose processes answer with given scores."""

    def __init__(self, folder: Path, parallel: int) -> None:
        self.journal, self.records = MemoryJournal(), MemoryRecords()
        self.folder, self.parallel = folder, parallel
        self.begin()

    def begin(self) -> None:
        """Begin where the journal ends, as after the death of all processes."""
        session = MethodSession(Many(space=SPACE, steps_per_trial=6), self.journal)
        files, parallel = StateFiles(self.folder), self.parallel
        self.search = SearchController(session, make_config, ACCURACY, self.records, files, parallel=parallel)
        self.orders = [order for _ in range(parallel) if (order := begin(self.search)) is not None]

    def hear(self, told: TrialResult) -> None:
        """Hear the answer to the first order; the same process then does what is next."""
        del self.orders[0]
        if (further := self.search.receive(told) or begin(self.search)) is not None:
            self.orders.append(further)

    def run(self, scores: dict[int, float | None], *, is_killed: bool) -> None:
        """Run all trials, which answer with these scores by step.

        With `is_killed` all processes die after each lot that has failed.
        """
        while self.orders:
            order = self.orders[0]
            self.hear(answer(order, scores[order.until]))
            if is_killed and order.until == max(scores) and order.trial % self.parallel == self.parallel - 1:
                self.begin()


FAILS_AT_ONCE, FAILS_LATER = {3: None}, {3: 0.5, 6: None}


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize(
    ("scores", "parallel", "num_lines"),
    [
        (FAILS_AT_ONCE, 1, 4),
        (FAILS_AT_ONCE, 2, 5),
        (FAILS_LATER, 1, 4),
        (FAILS_LATER, 2, 6),  # when the fifth fails, the sixth has reported and may yet end well
    ],
)
def test_a_search_whose_every_trial_fails_ends_early_though_they_had_reported(
    tmp_path: Path, scores: dict[int, float | None], parallel: int, num_lines: int, is_killed: bool
) -> None:
    loop = Answered(tmp_path, parallel)
    with pytest.raises(SearchError, match=f"first {num_lines} trials failed; the first: too late"):
        loop.run(scores, is_killed=is_killed)
    assert sorted(loop.records.lines) == list(range(num_lines))
    assert {line["status"] for line in loop.records.lines.values()} == {"failed"}


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_search_goes_on_while_a_trial_that_has_reported_may_yet_end_well(tmp_path: Path, is_killed: bool) -> None:
    loop = Answered(tmp_path, 2)
    loop.hear(answer(loop.orders[0], 0.5))
    while len(loop.records.lines) < 19:
        if is_killed:
            loop.begin()
        loop.orders.sort(key=lambda order: order.trial == 0)  # it takes longer than all others
        loop.hear(answer(loop.orders[0], None))
    loop.hear(answer(loop.orders[0], 0.6))
    assert loop.search.is_over
    assert {trial for trial, line in loop.records.lines.items() if line["status"] == "succeeded"} == {0}
    assert len(loop.records.lines) == 20


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_objective_that_was_reported_once_is_named_right_though_that_trial_failed(
    tmp_path: Path, is_killed: bool
) -> None:
    loop = Answered(tmp_path, 1)
    for score in (0.5, None):
        loop.hear(answer(loop.orders[0], score))
    if is_killed:
        loop.begin()
    order = loop.orders[0]
    loop.hear(TrialResult(order.trial, order.until, {"loss": 0.5}))
    assert loop.records.lines[order.trial]["status"] == "failed"
    assert "no trial reports 'accuracy'" in loop.records.lines[order.trial]["error"]
