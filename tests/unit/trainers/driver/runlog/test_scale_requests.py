"""Answers of a run to requests for another number of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.control_files import Asked
from orchestray.platform.run.directory import RunDirectory
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.driver.runlog.scale_requests import RefusedError, ScaleRequests, find_change

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


def test_a_refusal_has_its_exit_status() -> None:
    assert (RefusedError("no").exit_status, RefusedError("no", 2).exit_status) == (1, 2)
