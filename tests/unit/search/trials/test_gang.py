"""Orders that a gang takes and results that it gives; no worker is started."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestray.platform.errors import StorageError, TrainingError
from orchestray.platform.run.memory_store import HeldFolders
from orchestray.platform.run.metrics import read_lines
from orchestray.platform.run.store import open_store
from orchestray.search.checkpoints.state_files import StateFiles
from orchestray.search.engine.controller import SearchController
from orchestray.search.engine.messages import GANG, TrialLimits, TrialResult, TrialTask
from orchestray.search.engine.objective import Bound, Objective, Objectives
from orchestray.search.engine.session import MemoryJournal, MethodSession
from orchestray.search.engine.trial_worker import TrialHost
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.search.trials import gang as gang_trial
from orchestray.search.trials.gang import GangTrial
from orchestray.search.trials.program import OF_REPLICAS, TrialState
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.schema import Strategy
from orchestray.trainers.core.outcome import Outcome
from support.search_loop import ACCURACY, MemoryRecords, base, begin, make_config

ROOM: Any = SimpleNamespace(cluster=SimpleNamespace(parked=[]), address="127.0.0.1")
"""A pool in which no worker can be started."""


def gang(directory: Path) -> GangTrial:
    config = load_train_config(base() | {"strategy": {"network": {"data": 2}}})
    return GangTrial(config, room=ROOM, directory=str(directory))


def test_the_process_of_a_gang_with_gpus_computes_without_one(tmp_path: Path) -> None:
    data = base() | {"strategy": {"network": {"data": 2}}, "resources": {"gpus_per_worker": 1}}
    trial = GangTrial(load_train_config(data), room=ROOM, directory=str(tmp_path), unit="epochs")
    try:
        assert trial.has_validation()
        assert trial.advance(0).step == 0
        assert trial._clock.num_steps == trial.steps_per_epoch
    finally:
        trial.close()


def at_step(step: int) -> TrialState:
    data = base()
    alone = TrainingTrial(load_train_config(data | {"train": data["train"] | {"steps": 20}}))
    alone.advance(step)
    return alone.state()


def test_the_state_of_another_is_taken_byte_for_byte_and_sees_no_disk(tmp_path: Path) -> None:
    given = at_step(7)
    of_replicas = {"num_replicas": 2, "replicas": ["gossip", "none", 2]}
    own = {"exchange/replica-1/model/weight": torch.arange(6.0)}
    whole = TrialState({**given.tensors, **own}, {**given.position, OF_REPLICAS: of_replicas})
    trial = gang(tmp_path)
    trial.load(at_step(9))
    trial.load(whole)
    taken = trial.state()
    assert dict(taken.position) == dict(whole.position)
    assert taken.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert torch.equal(taken.tensors[name], tensor), name
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == []
    trial.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_momentum_of_another_is_taken_over_where_there_is_momentum_and_ignored_where_there_is_none(
    tmp_path: Path, momentum: float
) -> None:
    """Take the points of Omnivore's grid, which all go on from the one that trained."""
    data = base() | {"strategy": {"network": {"data": 2}}}
    data["train"] = data["train"] | {"optimizer": {"type": "sgd", "lr": 0.1, "momentum": momentum}}
    buffer = {"optimizer/0:0.weight.momentum_buffer": torch.arange(6.0)}
    given = at_step(2)
    trial = GangTrial(load_train_config(data), room=ROOM, directory=str(tmp_path))
    trial.load(TrialState({**given.tensors, **buffer}, given.position))
    taken = trial.state().tensors
    trial.close()
    assert taken.keys() - given.tensors.keys() == (buffer.keys() if momentum else set())


def test_what_only_replicas_need_is_nothing_to_a_trial_of_one_process(tmp_path: Path) -> None:
    trial = gang(tmp_path)
    trial.load(at_step(7))
    state = trial.state()
    trial.close()
    assert OF_REPLICAS in state.position
    alone = TrainingTrial(load_train_config(base()))
    alone.load(state)
    assert alone.step == 7
    assert OF_REPLICAS not in alone.state().position


def test_a_gang_counts_epochs_and_its_servers_end_a_part_of_them(tmp_path: Path) -> None:
    data = base()
    data["train"] |= {"epochs": 3, "steps": None, "batch_size": 24, "lr_schedule": {"type": "cosine"}}
    strategies = {"allreduce": {"network": {"data": 2}}, "servers": {"exchange": {"type": "parameter_server"}}}
    room: Any = SimpleNamespace(cluster=SimpleNamespace(parked=[]), address="127.0.0.1")
    for name, strategy in strategies.items():
        trial = GangTrial(
            load_train_config(data | {"strategy": strategy}), room=room, directory=str(tmp_path / name), unit="epochs"
        )
        steps_of_two = trial._clock.steps(2)
        settings = trial._settings_until(steps_of_two)
        trial.close()
        num_samples = len(TrainingTrial(load_train_config(data))._task.dataset("train")["point"])
        assert steps_of_two == 2 * -(-num_samples // 24)
        if name == "servers":
            assert (settings.epochs, settings.steps, settings.pause_at) == (None, steps_of_two, None)
            assert settings.lr_schedule["total_steps"] == steps_of_two * 3 // 2
        else:
            assert (settings.epochs, settings.steps, settings.pause_at) == (3, None, steps_of_two)


def test_a_checkpoint_that_is_gone_is_not_taken_for_one_that_never_was(tmp_path: Path) -> None:
    trial = gang(tmp_path)
    trial.load(at_step(7))
    trial._checkpoints.clear()
    with pytest.raises(TrainingError, match=r"checkpoint is not whole.* run fewer trials at once"):
        trial.state()
    trial.close()


def told_of(trial: GangTrial, directory: Path) -> TrialResult:
    """Return the answer of the process of a trial when that goes on."""
    host = TrialHost(TrialLimits(ACCURACY, str(directory)))
    host._program, host._are_named, host._trial = trial, True, 0
    told = host.work(TrialTask(0, 9, program=GANG))
    host.close()
    return told


def test_a_worker_that_does_not_reach_the_checkpoints_fails_its_trial_and_not_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = gang(tmp_path)

    def unreached(*_: object) -> None:
        with HeldFolders() as gone:
            location = gone.location
        open_store(location).names()

    monkeypatch.setattr(gang_trial, "run_in_actors", unreached)
    told = told_of(trial, tmp_path)
    assert not told.is_unsaved
    assert told.error is not None
    assert "do not reach the process of their trial" in told.error
    assert "on any port" in told.error


def test_a_worker_that_does_not_find_its_checkpoint_fails_its_trial_and_not_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = gang(tmp_path)
    location = trial._checkpoints.location

    def not_found(*_: object) -> None:
        with open_store(location).open_read("step-00000007", "model.safetensors"):
            pass

    monkeypatch.setattr(gang_trial, "run_in_actors", not_found)
    told = told_of(trial, tmp_path)
    assert not told.is_unsaved
    assert told.error is not None
    assert "checkpoint is lost" in told.error


def test_a_network_over_a_bound_of_its_size_starts_no_workers_and_is_validated_and_infeasible(tmp_path: Path) -> None:
    config = load_train_config(base() | {"strategy": {"network": {"data": 2}}})
    whole = TrainingTrial(config.model_copy(update={"strategy": Strategy()}), is_measured=True)
    validated, most = whole.advance(0), whole.measures()["parameters"] - 1
    objectives = Objectives([Objective("accuracy")], [Bound("parameters", most)])
    host = TrialHost(TrialLimits(objectives, str(tmp_path)))
    host._room = ROOM
    told = host.work(TrialTask(0, 1, config=config, begins=True, program=GANG, writes_state=True))
    assert told.error is None
    assert (told.step, told.is_over, told.is_written) == (0, True, True)
    assert told.metrics == validated.metrics
    assert objectives.violations({**told.metrics, **told.measures}) == (1 / most,)
    host._drop()


def test_a_disk_that_is_full_is_no_fault_of_a_gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageError("could not write the logs: the disk is full")

    monkeypatch.setattr(gang_trial, "run_in_actors", full)
    assert told_of(gang(tmp_path), tmp_path).is_unsaved


@pytest.mark.parametrize(
    "act",
    [GangTrial.state, lambda trial: trial.load(at_step(9)), lambda trial: trial.advance(9)],
    ids=["state", "load", "advance"],
)
def test_a_trial_that_does_not_reach_its_own_checkpoints_fails_as_a_trial(
    tmp_path: Path, act: Callable[[GangTrial], object]
) -> None:
    trial = gang(tmp_path)
    trial.load(at_step(7))
    trial._checkpoints.close()
    with pytest.raises(TrainingError, match="process of their trial"):
        act(trial)
    trial.close()


def test_a_trial_whose_checkpoint_goes_while_it_is_read_fails_as_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = gang(tmp_path)
    trial.load(at_step(7))
    found = trial._newest()
    trial._checkpoints.clear()
    monkeypatch.setattr(trial, "_newest", lambda: found)
    with pytest.raises(TrainingError, match="checkpoint is lost"):
        trial.state()
    trial.close()


def held_by_this_process() -> tuple[int, int]:
    """Return the numbers of open files, and of threads that hold folders."""
    return len(list(Path("/proc/self/fd").iterdir())), sum(one.name == "held-folders" for one in threading.enumerate())


def test_a_trial_that_cannot_be_built_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TrainingError("it cannot be built")

    monkeypatch.setattr(gang_trial.ReplicaSettings, "from_config", refuse)
    before = held_by_this_process()
    with pytest.raises(TrainingError, match="cannot be built"):
        gang(tmp_path)
    assert held_by_this_process() == before
    assert list(tmp_path.iterdir()) == []


def test_of_a_trial_that_cannot_be_closed_whole_the_rest_is_removed(tmp_path: Path) -> None:
    trial = gang(tmp_path)
    os.close(trial._run._lock_descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        trial.close()
    assert list(tmp_path.iterdir()) == []


def lines_of(*steps: int) -> list[dict[str, Any]]:
    """Return the lines of workers on these steps, each validated."""
    told: list[dict[str, Any]] = []
    for step in steps:
        line = {"step": step, "epoch": 0.0, "time_s": 0.1 * step, "loss": 1.0}
        told += [line, {**line, "split": "validation", "accuracy": step / 10}]
    return told


def test_what_workers_report_after_a_copy_and_a_loss_is_all_that_they_validated_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agreed(step: int) -> dict[str, Any]:
        return {"event": "agreed", "step": step, "lines": []}

    told = {
        9: [agreed(0), *lines_of(7, 8, 9)],
        10: [agreed(7), *lines_of(8, 9), agreed(7), *lines_of(8, 9, 10)],  # a worker was lost after step 9
    }

    def trained(_: object, attempt: Any) -> Outcome:
        pause_at = attempt.settings.pause_at
        attempt.run_log.record(told[pause_at])
        return Outcome("paused", pause_at, 0.0, {}, 0, 0, 0, 0.0)

    monkeypatch.setattr(gang_trial, "run_in_actors", trained)
    trial = gang(tmp_path)
    trial.advance(9)
    trial.load(at_step(7))
    progress = trial.advance(10)
    lines = read_lines(trial._run.paths.metrics)
    trial.close()
    assert [one["accuracy"] for one in progress.evaluations] == [0.8, 0.9, 1.0]
    assert [line["step"] for line in lines if "split" not in line] == [7, 8, 9, 10]


@pytest.mark.parametrize(("reached", "events", "left"), [(0, (), [5, 9]), (6, (), [9]), (0, (5,), [9])])
def test_a_fault_happens_once_however_often_a_gang_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: int, events: tuple[int, ...], left: list[int]
) -> None:
    trial = gang(tmp_path)
    kills = [{"kind": "kill", "role": "worker", "rank": 1, "at_step": step, "factor": 1.0} for step in (5, 9)]
    trial._settings = replace(trial._settings, faults=tuple(kills))
    if reached:
        trial.load(at_step(reached))
    for step in events:
        with trial._run.event_log(lambda: 0.0) as log:
            log.append("fault", role="worker", rank=1, kind="kill", at_step=step)
    seen: list[int] = []

    def noted(_: object, attempt: Any) -> None:
        seen.extend(fault["at_step"] for fault in attempt.settings.faults)
        raise TrainingError("enough is known")

    monkeypatch.setattr(gang_trial, "run_in_actors", noted)
    with pytest.raises(TrainingError, match="enough"):
        trial.advance(12)
    trial.close()
    assert seen == left


@pytest.mark.parametrize(("cost_s", "expected_s"), [(0.0, 10.0), (0.4, 10.0), (3.0, 60.0), (50.0, 600.0)])
def test_pauses_in_which_a_gang_is_saved_take_a_twentieth_of_its_time_at_most(
    tmp_path: Path, cost_s: float, expected_s: float
) -> None:
    host = TrialHost(TrialLimits(ACCURACY, str(tmp_path), save_every_s=10.0))
    trial = gang(tmp_path)
    trial.pause_cost_s = cost_s
    host._program = trial
    found_s = host._save_every_s()
    host.close()
    assert found_s == pytest.approx(expected_s)


def test_a_gang_that_becomes_another_in_its_own_process_is_a_gang_still(tmp_path: Path) -> None:
    def two_workers(*proposed: Any) -> Any:
        strategy = load_train_config(base() | {"strategy": {"network": {"data": 2}}}).strategy
        return make_config(*proposed).model_copy(update={"strategy": strategy})

    method = make_method(
        "population_based_training",
        space={"train.optimizer.lr": make_dimension("log_uniform", low=0.01, high=1.0)},
        population=2,
        steps_per_trial=6,
        interval_steps=3,
        fraction=0.5,
    )
    session, files = MethodSession(method, MemoryJournal()), StateFiles(tmp_path)
    search = SearchController(session, two_workers, ACCURACY, MemoryRecords(), files, parallel=2)
    good, bad = begin(search), begin(search)
    assert good is not None
    assert bad is not None
    search.receive(TrialResult(good.trial, good.until, {"accuracy": 0.9}))
    further = search.receive(TrialResult(bad.trial, bad.until, {"accuracy": 0.1}))
    assert further is not None
    assert further.config is not None
    assert session.trials[bad.trial].origin == (good.trial, 1)
    assert (further.trial, further.program, further.config.strategy.network.data) == (bad.trial, GANG, 2)
