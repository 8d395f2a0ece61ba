"""What a gang leaves behind when its process dies; no worker is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestray.platform.config.load import load_train_config
from orchestray.search.engine.conductor import Conductor
from orchestray.search.engine.director import Director, MemoryJournal
from orchestray.search.engine.gang_trial import GangTrial
from orchestray.search.engine.orders import GANG, Told
from orchestray.search.engine.state_files import StateFiles
from orchestray.search.methods.registry import make_method
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.search.trials.program import TrialState
from orchestray.search.trials.training import TrainingTrial
from support.search_loop import ACCURACY, MemoryRecords, base, make_config


def gang(directory: Path, trial: int) -> GangTrial:
    room: Any = SimpleNamespace(cluster=None)
    config = load_train_config(base() | {"strategy": {"network": {"data": 2}}})
    return GangTrial(config, room=room, directory=str(directory), trial=trial)


def at_step(step: int) -> TrialState:
    data = base()
    alone = TrainingTrial(load_train_config(data | {"train": data["train"] | {"steps": 20}}))
    alone.advance(step)
    return alone.state()


@pytest.mark.parametrize(("own_step", "expected"), [(None, 7), (3, 7), (9, 9)])
def test_a_later_process_of_a_trial_takes_over_the_checkpoint_of_a_gang_that_was_further(
    tmp_path: Path, own_step: int | None, expected: int
) -> None:
    dead, of_another = gang(tmp_path, 3), gang(tmp_path, 4)
    dead.load(at_step(7))
    of_another.load(at_step(8))
    StateFiles(tmp_path).remove_remains()  # as a search that goes on does
    later = gang(tmp_path, 3)
    if own_step is not None:
        later.load(at_step(own_step))
    later.take_over()
    found, wanted = later.state(), at_step(expected)
    assert found.position["step"] == expected
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
    assert not dead._folder.exists()
    assert of_another._folder.exists()
    for one in (later, of_another):
        one.close()
    assert list(tmp_path.glob("gang-*")) == []


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
    director, files = Director(method, MemoryJournal()), StateFiles(tmp_path)
    search = Conductor(director, two_workers, ACCURACY, MemoryRecords(), files, parallel=2)
    good, bad = search.begin(), search.begin()
    assert good is not None
    assert bad is not None
    search.heard(Told(good.trial, good.until, {"accuracy": 0.9}))
    further = search.heard(Told(bad.trial, bad.until, {"accuracy": 0.1}))
    assert further is not None
    assert further.config is not None
    assert director.trials[bad.trial].origin == (good.trial, 1)
    assert (further.trial, further.program, further.config.strategy.network.data) == (bad.trial, GANG, 2)
