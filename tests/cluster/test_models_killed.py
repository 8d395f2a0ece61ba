"""Models that users bring: a worker is killed, and the run ends with the bits of one in which nobody was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import orchestray
from orchestray.platform.actors.pool import make_room
from support.under_way import assert_same_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

MODELS = Path(__file__).parents[2] / "configs" / "models"
SHORT = ["train.epochs=null", "train.steps=8", "train.batch_size=64", "strategy.network.data=2"]
KILL = ["allow_faults=true", "faults=[{kill: worker/1, at_step: 6}]"]
"""A kill in the second half, which for the models of 256 samples, as `lora`, is the second epoch."""
IN_THE_FAST_LANE = ("gpt2", "vq_vae")


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    yield
    make_room(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_THE_FAST_LANE else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(path.stem for path in MODELS.glob("*.yaml"))
    ],
)
def test_a_worker_that_is_killed_changes_no_bit_of_the_model(name: str, cluster: Cluster, tmp_path: Path) -> None:
    file = MODELS / f"{name}.yaml"
    whole = orchestray.train(file, overrides=SHORT, runs_dir=tmp_path, name="whole")
    killed = orchestray.train(file, overrides=[*SHORT, *KILL], runs_dir=tmp_path, name="killed")
    assert_same_run(whole.path, killed.path)
    assert [run.result["restarts"] for run in (whole, killed)] == [0, 1]
