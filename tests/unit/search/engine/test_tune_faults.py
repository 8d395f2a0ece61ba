"""Faults of Ray Tune that are mended: each loss of a process is that of a trial, and nothing else is lost."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from orchestray.platform.cluster import ray_internals
from orchestray.search import tune_searcher
from orchestray.search.engine import tune_faults
from orchestray.search.spaces.dimensions import make_dimension
from support.cli import TIMEOUT_S


def answered(exception: Exception) -> Exception:
    """Return the error that Tune passes on when a call of a trial's process ends with this one."""
    tune_faults.mend()
    fails = ray_internals.find("ray.air.execution._internal.actor_manager:RayActorManager._actor_task_failed")
    found: list[Exception] = []
    actor = SimpleNamespace(actor_id=1, _on_error=None)
    task = SimpleNamespace(_tracked_actor=actor, _on_error=lambda _actor, error: found.append(error))
    own: Any = SimpleNamespace(_failed_actor_ids=set(), _cleanup_actor=lambda **_: None)
    fails(own, task, exception)
    (error,) = found
    return error


@pytest.mark.parametrize(
    "lost", [OutOfMemoryError("Memory on the node was 7.9GB / 8GB"), ActorUnschedulableError("gone")]
)
def test_any_loss_of_a_process_is_that_of_its_actor_with_its_reason(lost: RayError) -> None:
    error = answered(lost)
    assert isinstance(error, RayActorError)
    assert str(lost) in str(error)


def test_the_error_of_a_trial_itself_stays_what_it_is() -> None:
    error = RayTaskError("train", "traceback", ValueError("the user's"))
    assert answered(error) is error


def test_what_is_no_error_of_ray_still_ends_the_experiment() -> None:
    with pytest.raises(RuntimeError, match="unexpected exception"):
        answered(ValueError("a fault of Tune"))


def test_mending_twice_mends_once() -> None:
    tune_faults.mend()
    name = "ray.air.execution._internal.actor_manager:RayActorManager._actor_task_failed"
    before = ray_internals.find(name)
    tune_faults.mend()
    assert ray_internals.find(name) is before
    groups = ray_internals.find("ray.tune.execution.tune_controller:PlacementGroupResourceManager")
    assert groups is tune_faults.SettledPlacementGroups


def test_a_file_of_an_experiment_holds_the_old_state_or_the_new_at_every_moment(tmp_path: Path) -> None:
    tune_faults.mend()
    staged, stored, names = tmp_path / "staged", tmp_path / "stored", ("state.json", "trial/log.json")
    for folder, state in ((staged, b"new"), (stored, b"old")):
        (folder / "trial").mkdir(parents=True)
        for name in names:
            (folder / name).write_bytes(state)
    local, path = pyarrow.fs.FileSystem.from_uri(str(stored))
    syncer = SimpleNamespace(storage_filesystem=local)
    choose = ray_internals.find("ray.train._internal.storage:_FilesystemSyncer._sync_up_command")
    with (stored / names[0]).open("rb") as before, (stored / names[1]).open("rb") as also_before:
        store, what = choose(syncer, str(staged), path)
        (staged / names[0]).write_bytes(b"")  # Tune begins to write it again
        store(**what)
        assert (before.read(), also_before.read()) == (b"old", b"old")
    assert len(pickle.dumps(what)) < 500  # Tune keeps it in the very state that is stored
    assert [(stored / name).read_bytes() for name in names] == [b"new", b"new"]
    assert len(list(stored.rglob("*"))) == 3


def test_a_place_that_takes_no_files_is_left_to_tune_to_tell(tmp_path: Path) -> None:
    tune_faults.mend()
    staged, taken = tmp_path / "staged", tmp_path / "taken"
    staged.mkdir()
    (staged / "state.json").write_bytes(b"new")
    taken.write_bytes(b"a file")
    local, path = pyarrow.fs.FileSystem.from_uri(str(taken / "stored"))
    choose = ray_internals.find("ray.train._internal.storage:_FilesystemSyncer._sync_up_command")
    store, what = choose(SimpleNamespace(storage_filesystem=local), str(staged), path)
    with pytest.raises(OSError, match="taken"):
        store(**what)


def searcher() -> Any:
    return tune_searcher("grid", {"lr": make_dimension("choice", values=[1])}, metric="accuracy")


TRAINABLE = """
from orchestray.search import trainable
train = {"steps": 1, "batch_size": 8, "optimizer": {"type": "sgd", "lr": 0.1}}
trainable({"name": "digits", "task": {"type": "digits"}, "train": train})
"""
SEARCHER = """
from orchestray.search import tune_searcher
from orchestray.search.spaces.dimensions import make_dimension
tune_searcher("grid", {"lr": make_dimension("choice", values=[1])}, metric="accuracy")
"""
RESTORED = f"import pickle; pickle.loads({pickle.dumps(searcher())!r})"
LOST = """
from types import SimpleNamespace
from ray.exceptions import OutOfMemoryError
from orchestray.platform.cluster import ray_internals
fails = ray_internals.find("ray.air.execution._internal.actor_manager:RayActorManager._actor_task_failed")
task = SimpleNamespace(
    _tracked_actor=SimpleNamespace(actor_id=1, _on_error=None),
    _on_error=lambda _actor, error: print("the trial has failed:", type(error).__name__),
)
own = SimpleNamespace(_failed_actor_ids=set(), _cleanup_actor=lambda **_: None)
fails(own, task, OutOfMemoryError("Memory on the node was 7.9GB / 8GB"))
"""


MADE = {"trainable": TRAINABLE, "searcher": SEARCHER, "restored searcher": RESTORED}
FORKS = """
import json, os, sys, traceback
import ray.tune, torch
for name, code in json.load(sys.stdin).items():
    print(f"{name}: ", end="", flush=True)
    if (child := os.fork()) == 0:
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
"""A program that runs pieces of code from its input, each in a process that has imported Tune and no more."""


@pytest.fixture(scope="module")
def printed() -> tuple[list[str], str]:
    """Return the line of each piece of `MADE`, and what went wrong."""
    pieces = json.dumps({name: made + LOST for name, made in MADE.items()})
    command = [sys.executable, "-c", FORKS]
    done = subprocess.run(command, input=pieces, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("made", MADE)
def test_what_a_users_own_tuner_is_given_has_a_process_killed_for_memory_be_one_failed_trial(
    made: str, printed: tuple[list[str], str]
) -> None:
    assert f"{made}: the trial has failed: RayActorError" in printed[0], printed[1]
