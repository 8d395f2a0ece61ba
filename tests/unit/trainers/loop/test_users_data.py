"""Mixed, endless and randomly changed data train the same model under every layout, resumed or not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from support.central_run import central_settings, train_central
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.training import few_digits, furthest, same_bits
from support.users_data import KINDS, UsersData

STEPS = 9
"""Steps of 24 samples: two epochs of the mix, and one and a half passes of the endless data."""
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two replicas, zero 3": ({"data": 2}, {"shard": "parameters"}),
    "pipeline": ({"pipeline": 2}, {}),
}


@cache
def alone(kind: str) -> LaidOut:
    return train_laid_out(partial(UsersData, kind), layout_settings(steps=STEPS))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_that_of_one_process(kind: str, layout: str) -> None:
    found = train_laid_out(partial(UsersData, kind), layout_settings(*LAYOUTS[layout], steps=STEPS))
    assert furthest(found.weights, alone(kind).weights) < 1e-12
    plain = train_laid_out(few_digits, layout_settings(steps=STEPS))
    assert furthest(plain.weights, alone(kind).weights) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_nothing(kind: str) -> None:
    found = train_laid_out(partial(UsersData, kind), layout_settings({"microbatches": 1}, steps=STEPS))
    assert furthest(found.weights, alone(kind).weights) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_bits(kind: str, tmp_path: Path) -> None:
    def writer() -> CheckpointWriter:
        return CheckpointWriter(str(tmp_path), keep=1)

    settings = layout_settings({"data": 2}, steps=STEPS)
    whole = train_laid_out(partial(UsersData, kind), settings)
    train_laid_out(partial(UsersData, kind), replace(settings, pause_at=5), checkpoints=writer)
    found, _ = latest_good(str(tmp_path))
    assert found is not None
    assert found.step == 5
    again = train_laid_out(partial(UsersData, kind), settings, load=lambda: Loaded(found))
    assert same_bits(again.weights, whole.weights)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_of_parameter_servers_get_the_same_samples(kind: str, tmp_path: Path) -> None:
    settings = central_settings(2, {"consistency": "synchronous"}, steps=STEPS)
    found = train_central(partial(UsersData, kind), settings, tmp_path)
    assert furthest(found.weights, alone(kind).weights) < 1e-12


def test_endless_data_need_a_number_of_steps() -> None:
    with pytest.raises(ConfigError, match=r"give train\.steps instead"):
        train_laid_out(partial(UsersData, "endless"), layout_settings(steps=None, epochs=2))
