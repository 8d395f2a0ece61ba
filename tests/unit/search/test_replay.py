"""The winner's schedule, and the run that follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.errors import ConfigError, RunNameError
from orchestray.search.engine.session import MemoryJournal, MethodSession
from orchestray.search.methods.base import Exploit, Pause, Report
from orchestray.search.methods.population.pbt import PopulationBasedTraining
from orchestray.search.replay import config_at, read_schedule, replay, schedule_of, train_by_schedule
from orchestray.search.spaces.dimensions import Choice, Dimension, Uniform
from orchestray.search.trials.packed import PackedPopulation
from orchestray.search.trials.program import TrialState
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.load import load_train_config

LR, MOMENTUM, BATCH = "train.optimizer.lr", "train.optimizer.momentum", "train.batch_size"
SPACE: dict[str, Dimension] = {LR: Uniform(1e-4, 1.0, is_log=True), MOMENTUM: Uniform(0.1, 0.95)}
STEPS = 40


def base() -> Any:
    train = {"batch_size": 256, "steps": STEPS, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.5}}
    return load_train_config({"name": "winner", "task": {"type": "digits", "hidden": [8]}, "train": train})


def searched(method: PopulationBasedTraining) -> tuple[MemoryJournal, dict[int, TrialState]]:
    """Search with ordinary trials, one after the other; return the journal, and each trial's state at its end."""
    journal = MemoryJournal()
    session = MethodSession(method, journal)
    trials: dict[int, TrainingTrial] = {}
    states: dict[int, TrialState] = {}
    queue: list[int] = []
    while (proposal := session.ask()) is not None:
        trials[proposal.trial] = TrainingTrial(config_at(base(), proposal.changes))
        queue.append(proposal.trial)

    def act(trial: int, decision: Any) -> None:
        if isinstance(decision, Exploit):
            config = config_at(base(), decision.changes)
            trials[trial] = TrainingTrial(config)
            trials[trial].load(states[decision.source])
            states[trial] = states[decision.source]
        if not isinstance(decision, Pause) and session.trials[trial].step < STEPS:
            queue.append(trial)

    while queue:
        trial = queue.pop(0)
        progress = trials[trial].advance(session.next_report(trial))
        states[trial] = trials[trial].state()
        decision = session.report(Report(trial, progress.step, -progress.metrics["loss"]))
        act(trial, decision)
        for released, later in journal.entries()[-1]["released"]:
            is_copy = later["decision"] == "become"
            act(released, Exploit(later["source"], later["changes"], later["change"]) if is_copy else None)
    return journal, states


@pytest.mark.parametrize("synchronous", [False, True])
def test_one_run_by_the_winners_schedule_comes_to_the_winners_weights(tmp_path: Path, synchronous: bool) -> None:
    method = PopulationBasedTraining(
        space={**SPACE, BATCH: Choice((128, 256))},
        population=4,
        interval_steps=8,
        steps_per_trial=STEPS,
        synchronous=synchronous,
        initial=[{LR: 0.001}, {LR: 0.01}, {LR: 0.03}, {LR: 0.06}],
    )
    journal, states = searched(method)
    ends = {entry["report"]["trial"]: entry["report"] for entry in journal.entries() if entry["call"] == "report"}
    winner = max(ends, key=lambda trial: ends[trial]["score"])
    schedule = schedule_of(journal.entries(), winner)
    assert len(schedule) >= 2
    assert [step for step, _ in schedule] == sorted({step for step, _ in schedule})
    run = train_by_schedule(base(), schedule, runs_dir=tmp_path)
    model = run.load_model().state_dict()
    for name, value in model.items():
        assert torch.equal(value, states[winner].tensors[f"model/{name}"]), name
    assert run.result["steps"] == STEPS


def test_a_schedule_is_followed_by_as_many_threads_as_a_trial_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, threads = TrainingTrial.advance, []

    def noted(trial: TrainingTrial, step: int) -> Any:
        threads.append(torch.get_num_threads())
        return advance(trial, step)

    monkeypatch.setattr(TrainingTrial, "advance", noted)
    before = torch.get_num_threads()
    for cpus in (2.0, 0.5):
        train_by_schedule(
            base(), [(0, {})], overrides=[f"resources.cpus_per_worker={cpus}"], runs_dir=tmp_path, name=f"by-{cpus}"
        )
    assert threads == [2, 1]
    assert torch.get_num_threads() == before


def test_a_packed_winners_schedule_comes_to_its_weights_up_to_rounding(tmp_path: Path) -> None:
    method = PopulationBasedTraining(
        space=SPACE,
        population=4,
        interval_steps=8,
        steps_per_trial=STEPS,
        packed=True,
        initial=[{LR: 0.001}, {LR: 0.01}, {LR: 0.02}, {LR: 0.03}],
        factors=(1.5, 2.0),
    )
    method.judge_by("loss", "min")
    journal = MemoryJournal()
    session = MethodSession(method, journal)
    proposal = session.ask()
    assert proposal is not None
    config = base().model_copy(update={"train": base().train.model_copy(update={"precision": "float64"})})
    program = PackedPopulation(config, **proposal.arguments)
    for step in range(8, STEPS + 1, 8):
        progress = program.advance(step)
        session.report(Report(0, progress.step, -progress.metrics["loss"], told=progress.told))
    schedule = schedule_of(journal.entries())
    assert len(schedule) >= 2
    assert program.best > 0
    assert schedule_of(journal.entries(), program.best) == schedule  # a result names the member
    run = train_by_schedule(config, schedule, runs_dir=tmp_path)
    wanted = program.state_of(program.best).tensors
    for name, value in run.load_model().state_dict().items():
        torch.testing.assert_close(value, wanted[f"model/{name}"].to(value.dtype), rtol=1e-9, atol=1e-12)


def test_a_trial_that_failed_after_its_best_report_is_not_followed() -> None:
    journal = MemoryJournal()
    method = PopulationBasedTraining(space=SPACE, population=2, interval_steps=8, steps_per_trial=STEPS)
    session = MethodSession(method, journal)
    proposals = [session.ask(), session.ask()]
    for trial, score in ((0, 0.9), (1, 0.5)):
        session.report(Report(trial, 8, score))
    session.tell(0, "failed", error="its loss is NaN")
    assert proposals[1] is not None
    assert schedule_of(journal.entries()) == [(0, dict(proposals[1].changes))]


def test_a_copy_of_a_trial_that_had_ended_follows_what_that_trial_had_done_and_not_what_was_decided_on_it() -> None:
    journal = MemoryJournal()
    method = PopulationBasedTraining(
        space=SPACE, population=4, interval_steps=8, steps_per_trial=STEPS, exploit="truncation", fraction=0.25
    )
    session = MethodSession(method, journal)
    proposals = [session.ask() for _ in range(4)]
    for trial, score in ((0, 0.9), (1, 0.5), (2, 0.6)):
        session.report(Report(trial, 8, score))
    over = session.report(Report(3, 8, 0.1), is_over=True)
    assert isinstance(over, Exploit), "it is to copy the best, and has ended"
    [*_, entry] = journal.entries()
    copy = {**entry, "report": {**entry["report"], "trial": 1, "step": 16, "score": 0.2}, "is_over": False}
    copy["decision"] = {**entry["decision"], "source": 3, "changes": {LR: 0.5}}
    last = {**copy, "report": {**copy["report"], "score": 1.0}, "decision": {"decision": "continue"}}
    assert proposals[3] is not None
    wanted = [(0, dict(proposals[3].changes)), (8, {LR: 0.5})]
    assert schedule_of([*journal.entries(), copy, last], 1) == wanted


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunNameError, match="no directory of a search"):
        read_schedule(tmp_path)
    with pytest.raises(ConfigError, match="no report yet"):
        schedule_of([])
    two = base().model_copy(
        update={
            "strategy": load_train_config(
                {**base().model_dump(mode="json"), "strategy": {"network": {"data": 2}}}
            ).strategy
        }
    )
    with pytest.raises(ConfigError, match="followed by one worker"):
        train_by_schedule(two, [(0, {})], runs_dir=tmp_path)
    with pytest.raises(ConfigError, match="the schedule of the search"):
        train_by_schedule(base(), [(0, {LR: -1.0})], runs_dir=tmp_path)
    (tmp_path / "winner").mkdir()
    with pytest.raises(RunNameError, match="in use"):
        train_by_schedule(base(), [(0, {})], runs_dir=tmp_path)
    with pytest.raises(RunNameError):
        replay(base(), tmp_path, runs_dir=tmp_path)
