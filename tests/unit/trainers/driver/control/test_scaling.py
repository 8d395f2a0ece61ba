"""Requests for another number of replicas as events, and decisions as processes and answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestray.platform.errors import ClusterError
from orchestray.platform.run.control_files import Asked
from orchestray.platform.run.directory import RunDirectory
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.driver.control.events import Grown, NotGrown, ScaleWanted
from orchestray.trainers.driver.control.scaling import Scaling
from orchestray.trainers.driver.runlog.scale_requests import ScaleRequests

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
        self.membership = self
        self.growth: FakeGrowth | None = None
        self.cancelled = False
        self.asked: list[tuple[int, int]] = []
        self._error = error

    def begin_growth(self, num_members: int, _host: str, settings: ReplicaSettings) -> None:
        self.asked.append((num_members, settings.layout.data))
        self.growth = FakeGrowth(self, self._error)


def scaling(run: RunDirectory, gang: FakeGang) -> tuple[Scaling, ScaleRequests]:
    scale_requests = ScaleRequests(run)
    config = load_train_config(run.paths.config)
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    run_log: Any = SimpleNamespace(scale_requests=scale_requests)
    fake: Any = gang
    return Scaling(run_log, fake, "host", settings), scale_requests


def test_a_run_grows_only_once_the_new_members_are_ready(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "digits") as run:
        written(run, strategy={"network": {"data": 1, "pipeline": 2}})
        gang = FakeGang()
        changes, _ = scaling(run, gang)
        Asked(run.path, {"scale": {"data": 3}})
        assert changes.news() == [ScaleWanted(6)]
        assert changes.news() == [], "it is wanted once"
        assert changes.grow() == []
        assert gang.asked == [(4, 3)]  # two more copies of two stages
        assert changes.news() == []
        assert gang.growth is not None
        gang.growth.ready = True
        assert changes.news() == [Grown()]
        assert changes.news() == []


def test_what_is_refused_is_cancelled_and_answered_with_the_reason(run: RunDirectory) -> None:
    gang = FakeGang()
    changes, scale_requests = scaling(run, gang)
    asked = Asked(run.path, {"scale": {"data": 3}})
    changes.news()
    changes.grow()
    changes.refuse("The run is being stopped.")
    assert gang.cancelled
    assert asked.wait(0.0)["error"] == "The run is being stopped."
    assert scale_requests.change is None


def test_a_cluster_without_room_is_a_refusal_and_no_failure_of_the_run(run: RunDirectory) -> None:
    changes, _ = scaling(run, FakeGang(ClusterError("It has 2 CPU.")))
    Asked(run.path, {"scale": {"data": 3}})
    changes.news()
    changes.grow()
    assert changes.news() == [NotGrown("It has 2 CPU. The run goes on as it was.")]
