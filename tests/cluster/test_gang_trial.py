"""State that a trial of several workers hands on: all that its workers are, from memory to memory."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch

from orchestray.platform.actors.gang import Gang
from orchestray.platform.actors.pool import make_room
from orchestray.platform.errors import TrainingError
from orchestray.search.checkpoints.state_files import StateAt, StateFiles
from orchestray.search.engine.messages import GANG, TrialLimits, TrialTask
from orchestray.search.engine.trial_worker import TrialHost
from orchestray.search.trials.gang import GangTrial, WorkerPool
from orchestray.trainers.config.load import load_train_config
from support.patience import PATIENCE_S
from support.placed_task import FIRST_HELD, HELD_AT
from support.search_loop import ACCURACY

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.search.trials.program import TrialState
    from orchestray.trainers.config.schema import TrainConfig

_STEPS = 3 * HELD_AT
_LOOK_S = 0.02
TINY = {"type": "support.tiny_task:TinyTask"}


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    make_room(cluster)
    yield
    make_room(cluster)


def config(task: dict[str, Any], strategy: dict[str, Any], steps: int) -> TrainConfig:
    train = {"batch_size": 8, "steps": steps, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}}
    whole = {"network": {"data": 2}, **strategy}
    return load_train_config({"name": "gang", "task": task, "train": train, "strategy": whole})


def room(cluster: Cluster) -> Any:
    return SimpleNamespace(cluster=cluster, address="127.0.0.1", close=lambda: None)


def assert_same(found: TrialState, expected: TrialState) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


@pytest.mark.parametrize(
    "strategy",
    [
        {"exchange": {"type": "parameter_server"}},
        {"exchange": {"type": "averaging", "every": 4}},
        {"compression": {"type": "topk", "ratio": 0.2}},
    ],
    ids=["servers", "averaging", "residuals"],
)
def test_a_gang_goes_on_from_the_state_of_another_as_that_one_itself_and_no_weights_see_a_disk(
    cluster: Cluster, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    wanted = config(TINY, strategy, 12)
    one, other = (GangTrial(wanted, room=room(cluster), directory=str(tmp_path)) for _ in range(2))
    try:
        one.advance(6)  # two steps after the last average: each replica has weights of its own
        other.load(one.state())
        told = [trial.advance(12) for trial in (one, other)]
        assert all(trial.pause_cost_s > 0 for trial in (one, other))  # the workers were warm
        assert told[0].metrics == told[1].metrics
        assert_same(other.state(), one.state())
        assert list(tmp_path.rglob("*.safetensors")) == []
        other.leave_run(tmp_path / "left")
        assert (tmp_path / "left" / "model" / "model.safetensors").is_file()
    finally:
        one.close()
        other.close()


def test_what_it_takes_to_start_workers_is_not_taken_for_the_cost_of_a_pause(cluster: Cluster, tmp_path: Path) -> None:
    make_room(cluster)
    three = config(TINY, {"network": {"data": 3}}, 12)
    other, trial = (
        GangTrial(one, room=room(cluster), directory=str(tmp_path)) for one in (three, config(TINY, {}, 12))
    )
    try:
        other.advance(1)
        assert cluster.parked  # of another shape
        trial.advance(1)
        assert trial.pause_cost_s == 0
        trial.advance(2)
        assert trial.pause_cost_s > 0
    finally:
        trial.close()
        other.close()


def test_a_process_without_places_for_workers_says_what_has_them(cluster: Cluster) -> None:
    with pytest.raises(TrainingError, match="run the trial by `orchestray search`"):
        WorkerPool("127.0.0.1")


@contextmanager
def host(cluster: Cluster, directory: Path) -> Iterator[TrialHost]:
    made = TrialHost(TrialLimits(ACCURACY, str(directory), save_every_s=600.0))
    made._room = room(cluster)
    try:
        yield made
    finally:
        made.close()


def let_go_once_all_are_asked_to_stop(monkeypatch: pytest.MonkeyPatch, hold: Path) -> None:
    """Let workers wait while there is a file, until the wish to stop has come to each of them in that step."""
    control = Gang.control

    def told(gang: Gang, method: str, *arguments: Any) -> list[Any]:
        answers = control(gang, method, *arguments)
        if method == "request_stop":
            ray.get(answers, timeout=PATIENCE_S)
            hold.unlink(missing_ok=True)
        return answers

    monkeypatch.setattr(Gang, "control", told)


def num_held(folder: Path) -> int:
    return sum(place.read_text().endswith(f" {HELD_AT}\n") for place in folder.iterdir())


def test_a_gang_is_saved_on_its_way_and_goes_on_from_there_in_another_process_to_what_it_would_have_come_to(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "places").mkdir()
    hold = tmp_path / "hold"
    task = {
        "type": "support.placed_task:PlacedTask",
        "trial": FIRST_HELD,
        "folder": str(tmp_path / "places"),
        "hold": str(hold),
    }
    wanted = config(task, {}, _STEPS)
    order = TrialTask(FIRST_HELD, _STEPS, config=wanted, begins=True, program=GANG, writes_state=True)
    with host(cluster, tmp_path / "whole") as whole:
        expected = whole.work(order)
    assert expected.error is None
    state = StateFiles(tmp_path / "whole").read(StateAt(FIRST_HELD, 1))

    shutil.rmtree(tmp_path / "places")
    (tmp_path / "places").mkdir()
    files = StateFiles(tmp_path / "paused")
    hold.touch()
    let_go_once_all_are_asked_to_stop(monkeypatch, hold)
    is_over = threading.Event()
    with host(cluster, tmp_path / "paused") as first:

        def are_held() -> bool:
            """Wait until both workers are in the step; return True if they came there."""
            limit_s = time.monotonic() + PATIENCE_S
            while num_held(tmp_path / "places") < 2:
                if is_over.wait(_LOOK_S) or time.monotonic() > limit_s:
                    return False
            return True

        def pause() -> None:
            came = False
            try:
                came = are_held()
            finally:
                if came:
                    first.stop()
                else:
                    hold.unlink(missing_ok=True)

        pausing = threading.Thread(target=pause)
        pausing.start()
        try:
            paused = first.work(order)
        finally:
            is_over.set()
            pausing.join()
            hold.unlink(missing_ok=True)
        assert paused.error is None
        on_the_way = StateAt(FIRST_HELD, 1, is_on_the_way=True)
        position = files.read(on_the_way).position
    assert (paused.metrics, paused.evaluations) == (expected.metrics, expected.evaluations)
    assert HELD_AT <= position["step"] < _STEPS

    with host(cluster, tmp_path / "paused") as second:  # as after the death of the first
        resumed = second.work(TrialTask(**{**vars(order), "source": on_the_way}))
    assert (resumed.metrics, resumed.evaluations) == (expected.metrics, expected.evaluations)
    assert_same(files.read(StateAt(FIRST_HELD, 1)), state)
