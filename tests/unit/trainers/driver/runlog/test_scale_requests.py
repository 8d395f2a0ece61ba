"""Answers of a run to requests for another number of replicas."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestray.platform.errors import ClusterError, ConfigError
from orchestray.platform.run.control_files import Asked
from orchestray.platform.run.directory import RunDirectory
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.driver.runlog.scale_requests import RefusedError, ScaleRequests, find_change
from orchestray.trainers.driver.runlog.scaling import Scaling

TRAIN = {"batch_size": 16, "epochs": 2, "optimizer": {"type": "sgd", "lr": 0.1}}


def written(directory: RunDirectory, **sections: Any) -> RunDirectory:
    data = {"name": directory.name, "task": {"type": "digits"}, "train": TRAIN, **sections}
    data.setdefault("strategy", {"network": {"data": 2}})
    directory.write_config(dump_yaml(load_train_config(data)))
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with RunDirectory.create(tmp_path, "digits") as directory:
        yield written(directory)


def looked(scale_requests: ScaleRequests) -> Any:
    """Look at all requests there are; return the change to make."""
    scale_requests._inbox._look_at_s = float("-inf")
    return scale_requests.look()


@pytest.mark.parametrize(
    ("sections", "data", "text"),
    [
        ({}, 0, "--data must be 1 or more, got 0"),
        ({}, 2, "Run 'digits' has data: 2 already"),
        ({"engine": "ray_train"}, 3, "Ray Train's workers .* start and end together"),
        (
            {"strategy": {"network": {"data": 2}, "exchange": {"type": "gossip"}}},
            1,
            "gossip is between replicas, and with data: 1 there is one replica",
        ),
        (
            {
                "strategy": {
                    "network": {"data": 3},
                    "exchange": {"type": "parameter_server", "backup_workers": 1},
                }
            },
            1,
            "must be fewer than strategy.network.data",
        ),
        (
            {"strategy": {"network": {"data": 5}, "aggregation": {"type": "krum", "byzantine": 1}}},
            3,
            "byzantine",
        ),
    ],
    ids=["none", "equal", "ray train", "gossip of one", "backups", "byzantine"],
)
def test_a_number_that_the_config_does_not_allow_is_refused_with_the_reason(
    tmp_path: Path, sections: dict[str, Any], data: int, text: str
) -> None:
    with RunDirectory.create(tmp_path, "digits") as directory:
        written(directory, **sections)
        with pytest.raises(ConfigError, match=text):
            find_change(directory.path, data)


def test_what_is_done_is_in_the_config_and_in_the_answer(run: RunDirectory) -> None:
    scale_requests = ScaleRequests(run)
    asked = Asked(run.path, {"scale": {"data": 4}})
    change = looked(scale_requests)
    assert (change.before, change.after, change.grows) == (2, 4, True)
    assert load_train_config(run.paths.config).strategy.network.data == 2
    scale_requests.done(120)
    assert load_train_config(run.paths.config).strategy.network.data == 4
    expected = {"before": 2, "after": 4, "workers_before": 2, "workers_after": 4, "step": 120}
    assert asked.wait(0.0) == expected
    assert scale_requests.change is None


def test_one_change_is_made_at_a_time_and_the_second_is_judged_by_what_holds_then(run: RunDirectory) -> None:
    scale_requests = ScaleRequests(run)
    first, second = (Asked(run.path, {"scale": {"data": 4}}) for _ in range(2))
    assert looked(scale_requests) is looked(scale_requests)
    scale_requests.done(7)
    assert first.wait(0.0)["step"] == 7
    assert looked(scale_requests) is None
    answer = second.wait(0.0)
    assert (answer["error"], answer["exit_status"]) == ("Run 'digits' has data: 4 already; nothing was changed.", 2)


@pytest.mark.parametrize("content", [{}, {"scale": 3}, {"scale": {"data": "3"}}, {"scale": {"data": True}}])
def test_what_the_desk_does_not_understand_is_refused(run: RunDirectory, content: dict[str, Any]) -> None:
    scale_requests = ScaleRequests(run)
    asked = Asked(run.path, content)
    assert looked(scale_requests) is None
    assert "can only be asked to scale" in asked.wait(0.0)["error"]


def test_the_end_of_a_run_answers_who_waits(run: RunDirectory) -> None:
    scale_requests = ScaleRequests(run)
    asked = [Asked(run.path, {"scale": {"data": data}}) for data in (3, 4)]
    looked(scale_requests)
    scale_requests.close(55)
    for one in asked:
        assert one.wait(0.0)["error"] == "Run 'digits' ended at step 55, before it could be scaled."


class FakeGrowth:
    def __init__(self, gang: FakeGang, error: ClusterError | None) -> None:
        self.gang, self.error, self.ready = gang, error, False

    def is_ready(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.ready

    def cancel(self) -> None:
        self.gang.growth, self.gang.cancelled = None, True


class FakeGang:
    def __init__(self, error: ClusterError | None = None) -> None:
        self.growth: FakeGrowth | None = None
        self.cancelled = False
        self.asked: list[tuple[int, int]] = []
        self._error = error

    def begin_growth(self, num_members: int, _host: str, settings: ReplicaSettings) -> None:
        self.asked.append((num_members, settings.layout.data))
        self.growth = FakeGrowth(self, self._error)


def scaling(run: RunDirectory, gang: FakeGang, stop: threading.Event) -> tuple[Scaling, ScaleRequests, ReplicaSettings]:
    scale_requests = ScaleRequests(run)
    config = load_train_config(run.paths.config)
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    run_log: Any = SimpleNamespace(scale_requests=scale_requests)
    fake: Any = gang
    return Scaling(run_log, fake, "host", stop), scale_requests, settings


def test_a_run_grows_only_once_the_new_members_are_ready(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "digits") as run:
        written(run, strategy={"network": {"data": 1, "pipeline": 2}})
        gang = FakeGang()
        state, scale_requests, settings = scaling(run, gang, threading.Event())
        Asked(run.path, {"scale": {"data": 3}})
        looked(scale_requests)
        assert [state.ready(settings) for _ in range(3)] == [None] * 3
        assert gang.asked == [(4, 3)]  # two more copies of two stages
        assert gang.growth is not None
        gang.growth.ready = True
        assert state.ready(settings) is scale_requests.change


def test_a_run_that_is_interrupted_while_it_grows_gives_up_who_was_to_be_added(run: RunDirectory) -> None:
    gang, stop = FakeGang(), threading.Event()
    state, scale_requests, settings = scaling(run, gang, stop)
    asked = Asked(run.path, {"scale": {"data": 3}})
    looked(scale_requests)
    state.ready(settings)
    stop.set()
    assert state.ready(settings) is None
    assert gang.cancelled
    assert asked.wait(0.0)["error"] == "The run is being stopped."


def test_a_cluster_without_room_is_a_refusal_and_no_failure_of_the_run(run: RunDirectory) -> None:
    gang = FakeGang(ClusterError("It has 2 CPU."))
    state, scale_requests, settings = scaling(run, gang, threading.Event())
    asked = Asked(run.path, {"scale": {"data": 3}})
    looked(scale_requests)
    assert state.ready(settings) is None
    assert gang.cancelled
    assert asked.wait(0.0) == {"error": "It has 2 CPU. The run goes on as it was.", "exit_status": 1}


def test_a_refusal_has_its_exit_status() -> None:
    assert (RefusedError("no").exit_status, RefusedError("no", 2).exit_status) == (1, 2)
