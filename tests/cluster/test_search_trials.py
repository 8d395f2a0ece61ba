"""Searches on Ray: every way a trial can fail, the run of the best, and nothing that stays behind."""

from __future__ import annotations

import gc
import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import orchestray
from orchestray.platform.actors import placement
from orchestray.platform.actors.pool import make_room
from orchestray.platform.run.checkpoint import load_model_tensors
from orchestray.search.config.load import dump_search_yaml, load_search_config
from orchestray.search.engine.run import run_search
from orchestray.search.engine.session import SearchError
from orchestray.search.engine.tune_faults import has_place
from orchestray.search.results.run import load_search
from orchestray.search.results.writer import SearchRecords
from orchestray.trainers.saved.run import load_run
from support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestray.platform.cluster.cluster import Cluster

LR = "train.optimizer.lr"
FINE = {"type": "support.odd_task:OddTask", "behaviour": "fine"}


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    make_room(cluster)
    yield
    make_room(cluster)


def config(task: dict[str, Any], **search: Any) -> Any:
    return load_search_config(
        {
            "name": "odd",
            "base": {
                "name": "trial",
                "task": task,
                "train": {"batch_size": 8, "steps": 12, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}},
            },
            "search": {"method": {"type": "grid"}, "objective": {"metric": "accuracy"}, **search},
        }
    )


def test_a_search_has_the_places_that_a_training_before_kept_warm(cluster: Cluster, tmp_path: Path) -> None:
    task = {"type": "digits", "hidden": [4]}
    wanted = {
        "task": task,
        "train": {"batch_size": 64, "steps": 3, "optimizer": {"type": "sgd", "lr": 0.1}},
        "strategy": {"network": {"data": 2}},
    }
    orchestray.train(wanted, runs_dir=tmp_path, name="before")
    assert cluster.parked
    space = {"train.optimizer.lr": {"type": "choice", "values": [0.1, 0.2]}}
    with SearchRecords.create(tmp_path, "after") as records:
        assert run_search(config(task, space=space, parallel=2), records).status == "succeeded"
    assert not cluster.parked


def test_each_way_to_fail_is_recorded_and_the_search_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    import ray

    (tmp_path / "marks").mkdir()
    wanted = config(
        {"type": "support.odd_task:OddTask", "behaviour": "fine", "folder": str(tmp_path / "marks")},
        space={
            "task.behaviour": {
                "type": "choice",
                "values": ["fine", "raise", "killed_once", "hungry", "slow", "killed", "fine again"],
            }
        },
        budget={"trial_memory_mb": 1500, "trial_time_limit_s": 600},
        parallel=2,
    )
    with SearchRecords.create(tmp_path, "odd") as records:
        outcome = run_search(wanted, records, save_every_s=0.0)
        lines = {line["config"]["task.behaviour"]: line for line in records.lines.values()}
    assert outcome.status == "succeeded"
    assert {name: line["status"] for name, line in lines.items()} == {
        "fine": "succeeded",
        "raise": "failed",
        "killed_once": "succeeded",
        "hungry": "failed",
        "slow": "succeeded",
        "killed": "failed",
        "fine again": "succeeded",
    }
    assert "this trial is not meant to work" in lines["raise"]["error"]
    assert "ran out of memory" in lines["hungry"]["error"]
    assert "process died 2 times" in lines["killed"]["error"]
    assert lines["killed_once"]["objective"] == lines["fine"]["objective"]
    assert len(list((tmp_path / "odd" / "states").iterdir())) == 1, "the best, should there be more trials"
    left = [actor for actor in ray.util.list_named_actors() if actor]
    assert left == []


def test_a_trial_that_hears_nothing_is_ended_after_its_time_limit(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestray.search.engine.experiment.GRACE_S", 0.5)
    wanted = config(
        {"type": "support.odd_task:OddTask", "behaviour": "fine"},
        space={"task.behaviour": {"type": "choice", "values": ["fine", "stuck"]}},
        budget={"trial_time_limit_s": 5},
    )
    with SearchRecords.create(tmp_path, "stuck") as records:
        outcome = run_search(wanted, records)
        lines = {line["config"]["task.behaviour"]: line for line in records.lines.values()}
    assert outcome.status == "succeeded"
    assert (lines["stuck"]["status"], lines["fine"]["status"]) == ("failed", "succeeded")
    assert "time limit of 5 s" in lines["stuck"]["error"]


def test_a_search_given_more_time_goes_on_with_what_its_limit_stopped(cluster: Cluster, tmp_path: Path) -> None:
    task = {"type": "support.odd_task:OddTask", "behaviour": "slow"}
    search = {"space": {"train.optimizer.lr": {"type": "choice", "values": [0.1, 0.3]}}, "parallel": 2}
    budget = {"steps_per_trial": 100, "time_limit_s": 1.0}
    with SearchRecords.create(tmp_path, "timed") as records:
        run_search(config(task, **search, budget=budget), records)
        assert {line["reason"] for line in records.lines.values()} == {"the search's time limit"}
    with SearchRecords.open_existing(tmp_path, "timed") as records:
        assert records.seconds >= 1.0, "the limit is that of all attempts"
        outcome = run_search(config(task, **search, budget={**budget, "time_limit_s": 600}), records, resume=True)
        assert [(line["status"], line["steps"]) for line in records.lines.values()] == [("succeeded", 100)] * 2
        assert (records.paths.best / "model").is_dir()
        records.write_config(dump_search_yaml(config(task, **search, budget=budget)))
        lines = {line["config"]["train.optimizer.lr"]: line["objective"] for line in records.lines.values()}
    assert outcome.status == "succeeded"
    results = load_search(tmp_path / "timed").results
    assert [path.name for path in sorted((tmp_path / "timed" / "tune").iterdir())] == ["1", "2"]
    assert {one.config["train.optimizer.lr"]: one.metrics["accuracy"] for one in results} == lines
    assert [one.metrics["step"] for one in results] == [100, 100]
    best = results.get_best_result()
    assert best.metrics["accuracy"] == max(lines.values())
    assert Path(best.checkpoint.path).is_dir()


@pytest.mark.slow
def test_a_search_does_not_wait_for_trials_that_its_time_limit_stopped(cluster: Cluster, tmp_path: Path) -> None:
    wanted = config(
        {"type": "support.odd_task:OddTask", "behaviour": "fine"},
        space={"task.behaviour": {"type": "choice", "values": ["fine", "stuck"]}},
        budget={"time_limit_s": 20.0},
    )
    began_s = time.monotonic()
    with SearchRecords.create(tmp_path, "cut") as records:
        outcome = run_search(wanted, records)
        took_s = time.monotonic() - began_s
        lines = {line["config"]["task.behaviour"]: line for line in records.lines.values()}
    assert outcome.status == "succeeded"
    assert lines["fine"]["status"] == "succeeded"
    assert lines["stuck"]["reason"] == "the search's time limit"
    assert 20.0 <= took_s < 27.0, "Tune would wait ten seconds"


FAILING = """
from ray.tune import Callback

class Failing(Callback):
    def __init__(self, why):
        self.why = why

    def setup(self, **info):
        raise OSError(self.why)
"""
CALLBACK = """
import json

from ray.tune import Callback


class Seen(Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        with open("{place}", "a") as file:
            print(json.dumps([str(trial), trial.config, sorted(result)]), file=file)
"""


def test_callbacks_of_the_user_see_the_values_and_the_metrics_of_each_trial(cluster: Cluster, tmp_path: Path) -> None:
    file, place = tmp_path / "seen.py", tmp_path / "seen.jsonl"
    file.write_text(CALLBACK.replace("{place}", str(place)))
    space = {"train.optimizer.lr": {"type": "choice", "values": [0.1, 0.3]}}
    names = [f"{file}:Seen", "ray.tune.logger.tensorboardx:TBXLoggerCallback"]
    wanted = config({"type": "support.tiny_task:TinyTask"}, space=space, callbacks=names)
    with SearchRecords.create(tmp_path, "seen") as records:
        assert run_search(wanted, records).status == "succeeded"
    seen = [json.loads(line) for line in place.read_text().splitlines()]
    assert [values for _, values, _ in seen] == [{"train.optimizer.lr": 0.1}, {"train.optimizer.lr": 0.3}]
    assert all({"accuracy", "loss", "step", "training_iteration"} <= set(names) for _, _, names in seen)
    assert not any("orchestray" in names for _, _, names in seen)
    logs = sorted((tmp_path / "seen" / "tune").rglob("events.out.tfevents.*"))
    assert len(logs) == 2, "Tune's logger for TensorBoard has written one for each trial"
    assert all(b"ray/tune/accuracy" in log.read_bytes() for log in logs)


def test_a_callback_of_the_user_that_fails_ends_the_search_with_its_name(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(FAILING)
    space = {"train.optimizer.lr": {"type": "choice", "values": [0.1]}}
    callback = {"type": f"{file}:Failing", "why": "no server"}
    wanted = config({"type": "support.tiny_task:TinyTask"}, space=space, callbacks=[callback])
    with (
        SearchRecords.create(tmp_path, "failing") as records,
        pytest.raises(SearchError, match=r"Failing of search\.callbacks failed: OSError: no server\. Mend it"),
    ):
        run_search(wanted, records)


@pytest.mark.parametrize(("overrides", "asked"), [([], "1 worker"), (["base.strategy.network.data=2"], "2 worker")])
def test_a_search_whose_places_others_hold_says_once_what_it_asks_for_and_goes_on_when_they_let_go(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], asked: str
) -> None:
    import ray

    monkeypatch.setattr(placement, "PLACEMENT_TIMEOUT_S", 0.0)
    space = {"train.optimizer.lr": {"type": "choice", "values": [0.1]}}
    wanted = load_search_config(config({"type": "support.tiny_task:TinyTask"}, space=space), overrides)
    others = ray.util.placement_group([{"CPU": cluster.resources()["CPU"]}])
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        placement.remove([others])

    try:
        assert others.wait(int(PATIENCE_S))
        limit_s = time.monotonic() + PATIENCE_S
        while ray.available_resources().get("CPU", 0.0) > 0 and time.monotonic() < limit_s:
            time.sleep(0.02)
        with SearchRecords.create(tmp_path, "waiting") as records:
            assert run_search(wanted, records, notify=note).status == "succeeded"
    finally:
        placement.remove([others])
    assert len(notes) == 1
    assert f"could not place {asked}(s) with 1 CPU each" in notes[0]
    assert "of which 0 CPU and 0 GPU are free" in notes[0]


def test_the_best_run_is_what_train_makes_of_its_config(cluster: Cluster, tmp_path: Path) -> None:
    wanted = config(
        {"type": "digits", "hidden": [16]},
        space={"train.optimizer.lr": {"type": "log_uniform", "low": 0.001, "high": 0.3}},
        method={"type": "random"},
        budget={"trials": 4, "steps_per_trial": 30},
        parallel=2,
    )
    with SearchRecords.create(tmp_path, "random") as records:
        outcome = run_search(wanted, records)
        line = records.lines[outcome.best]
    best = load_run(tmp_path / "random" / "best")
    task, model = best.load_task(), best.load_model()
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        measured = task.metrics(model.eval()(batch["inputs"]), batch)["accuracy"]
    assert float(measured) == pytest.approx(line["objective"], abs=1e-6)
    trained = orchestray.train(best.path / "config.yaml", runs_dir=tmp_path, name="again")
    again = load_model_tensors(str(trained.path / "model"))
    for name, tensor in load_model_tensors(str(best.path / "model")).items():
        assert torch.equal(tensor, again[name]), name


class Asked(threading.Event):
    """A request to stop that never comes; Tune asks for it in every turn, and each time `look` is called."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def is_set(self) -> bool:
        self._look()
        return False


def test_a_process_that_starts_has_a_place_and_an_ended_search_has_none(cluster: Cluster, tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        seen.append((has_place(), any(logs.glob("trial-*.log"))))

    with SearchRecords.create(tmp_path, "placed") as records:
        logs = records.paths.logs
        run_search(config(FINE, space={LR: {"type": "choice", "values": [0.1]}}), records, stop=Asked(look))
    assert (True, False) in seen
    assert not has_place()


@pytest.mark.slow
def test_an_end_at_once_leaves_no_process_and_no_place_and_the_search_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    import ray

    two = {"space": {LR: {"type": "choice", "values": [0.1, 0.3]}}, "parallel": 2}

    def interrupt() -> None:
        if any(logs.glob("trial-*.log")):
            gc.collect()  # what is left of the search before is none of this one's
            raise KeyboardInterrupt

    kept = None
    try:
        gc.collect()
        gc.disable()  # so that it is left until then
        with SearchRecords.create(tmp_path, "before") as records:
            run_search(config(FINE, **two), records)
        with SearchRecords.create(tmp_path, "at-once") as records:
            logs = records.paths.logs
            wanted = config({**FINE, "behaviour": "slow"}, **two, budget={"steps_per_trial": 100})
            run_search(wanted, records, stop=Asked(interrupt))
    except KeyboardInterrupt as error:
        kept = error  # as a notebook keeps the last traceback, with all that it refers to
    finally:
        gc.enable()
    assert kept is not None
    assert {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"}
    with SearchRecords.open_existing(tmp_path, "at-once") as records:
        assert run_search(wanted, records, resume=True).status == "succeeded"
        assert [line["steps"] for line in records.lines.values()] == [100, 100]
