"""What a trial of several workers hands on: all that its workers are, from memory to memory."""

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
import torch

from orchestray.platform.config.load import load_train_config
from orchestray.platform.gang.pool import make_room
from orchestray.search.engine import gang_trial
from orchestray.search.engine.gang_trial import GangTrial
from orchestray.search.engine.host import TrialHost
from orchestray.search.engine.orders import GANG, Order, Rules
from orchestray.search.engine.state_files import KEPT, ON_THE_WAY, StateFiles, StatePlace
from support.patience import PATIENCE_S
from support.placed_task import FIRST_HELD, HELD_AT
from support.search_loop import ACCURACY

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.search.trials.program import TrialState

_STEPS = 300
"""Far more than a gang does between the moment that its driver hears of a stop and that its workers do."""
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


@contextmanager
def host(cluster: Cluster, directory: Path) -> Iterator[TrialHost]:
    made = TrialHost(Rules(ACCURACY, str(directory), save_every_s=600.0))
    made._room = room(cluster)
    try:
        yield made
    finally:
        made.close()


class Heard(threading.Event):
    """Tells when somebody has found it set."""

    def __init__(self) -> None:
        super().__init__()
        self.was_heard = threading.Event()

    def is_set(self) -> bool:
        found = super().is_set()
        if found:
            self.was_heard.set()
        return found


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
    order = Order(FIRST_HELD, _STEPS, config=wanted, begins=True, program=GANG)
    with host(cluster, tmp_path / "whole") as whole:
        expected = whole.work(order)
        state = whole._vault._at(FIRST_HELD, 1)
    assert expected.error is None
    assert state is not None

    shutil.rmtree(tmp_path / "places")
    (tmp_path / "places").mkdir()
    files = StateFiles(tmp_path / "paused")
    hold.touch()
    stop = Heard()
    monkeypatch.setattr(gang_trial, "threading", SimpleNamespace(Event=lambda: stop))
    with host(cluster, tmp_path / "paused") as first:

        def pause() -> None:
            """Once both workers are in the step."""
            limit_s = time.monotonic() + PATIENCE_S
            while num_held(tmp_path / "places") < 2 and time.monotonic() < limit_s:
                time.sleep(0.02)
            first.stop()
            stop.was_heard.wait(PATIENCE_S)
            hold.unlink()

        pausing = threading.Thread(target=pause)
        pausing.start()
        paused = first.work(order)
        pausing.join()
        position = files.read(FIRST_HELD, 1).position
    assert (paused.metrics, paused.evaluations) == (expected.metrics, expected.evaluations)
    assert position[KEPT][ON_THE_WAY]
    assert HELD_AT <= position["step"] < _STEPS

    monkeypatch.undo()
    with host(cluster, tmp_path / "paused") as second:  # as after the death of the first
        resumed = second.work(Order(**{**vars(order), "source": StatePlace(FIRST_HELD, 1)}))
        found = second._vault._at(FIRST_HELD, 1)
    assert (resumed.metrics, resumed.evaluations) == (expected.metrics, expected.evaluations)
    assert found is not None
    assert_same(found, state)
