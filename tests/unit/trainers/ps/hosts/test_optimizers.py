"""Optimizers that look at more than single elements, on synchronous servers: their steps are those of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, list_checkpoints
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.loop.checkpoint_source import Loaded
from support.central_run import train_central, train_through_a_loss_of_all_servers, train_with_a_lost_worker
from support.layouts import layout_settings, train_laid_out
from support.staged_run import staged_settings, train_staged
from support.training import digits, furthest, same_bits

BATCH = 25
"""Samples of a batch, which two or three workers cannot share evenly."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lars": {"type": "lars", "lr": 1.0},
    "lamb": {"type": "lamb", "lr": 0.01},
    "muon": {"type": "muon", "lr": 0.01},
    "muon, but for names": {"type": "muon", "lr": 0.01, "adamw": ["0.weight", "4.weight"]},
    "soap": {"type": "soap", "lr": 0.01, "every_steps": 2},
}
CURVATURE: dict[str, dict[str, Any]] = {
    "kfac": {"type": "kfac", "lr": 0.05, "damping": 0.03, "inverse_every_steps": 2, "kl_clip": 1e-4},
    "kfac, every 3": {
        "type": "kfac",
        "lr": 0.05,
        "damping": 0.03,
        "statistics_every_steps": 3,
        "inverse_every_steps": 3,
        "kl_clip": None,
    },
    "natural_gradient in groups": {
        "type": "natural_gradient",
        "lr": 0.05,
        "every_steps": 2,
        "groups": [{"match": "*.bias", "lr": 0.02}, {"match": "2.*", "weight_decay": 0.1}],
    },
}
UNCUT = ["kfac, every 3", "natural_gradient in groups"]
"""Those of which a layer's step has a length that does not depend on the others."""
TOLERANCES = {
    **dict.fromkeys(CURVATURE, 1e-10),
    "lars": 1e-10,
    "lamb": 1e-10,
    "soap": 1e-3 * OPTIMIZERS["soap"]["lr"],
    **{kind: 1e-2 * chosen["lr"] for kind, chosen in OPTIMIZERS.items() if chosen["type"] == "muon"},
}
"""Muon orthogonalises in bfloat16, and SOAP divides each entry by its size: both bring out last digits of a sum."""


def task() -> Any:
    return digits(hidden=[14, 12, 10], validation_fraction=0.02)


def keys(kind: str, steps: int = 4) -> dict[str, Any]:
    return {"optimizer": (OPTIMIZERS | CURVATURE)[kind], "batch_size": BATCH, "steps": steps}


@cache
def alone(kind: str, steps: int = 4) -> dict[str, Tensor]:
    return train_laid_out(task, layout_settings({"microbatches": 1}, **keys(kind, steps))).weights


def shards_of(kind: str) -> int:
    """Return a number of servers for two workers of a replica; one of them may hold a single layer."""
    return 2 if kind in CURVATURE else 4


def synchronous(data: int, steps: int = 4, *, kind: str, **exchange: Any) -> ReplicaSettings:
    network = {"data": data, "microbatches": 1}
    server = {"type": "parameter_server", "consistency": "synchronous", **exchange}
    return layout_settings(network, server, **keys(kind, steps))


@pytest.mark.parametrize(
    ("kind", "exchange"),
    [
        *((kind, {"shards": 5}) for kind in OPTIMIZERS),
        ("muon, but for names", {"shards": 3}),
        *((kind, {"shards": 2, "groups": 2}) for kind in ("lars", "soap")),
    ],
)
def test_servers_that_hold_whole_parameters_make_the_steps_of_one_server_and_of_one_process(
    kind: str, exchange: dict[str, int], tmp_path: Path
) -> None:
    found = train_central(task, synchronous(2, kind=kind, **exchange), tmp_path / "several")
    assert same_bits(found.weights, train_central(task, synchronous(2, kind=kind), tmp_path / "one").weights)
    assert furthest(found.weights, alone(kind)) <= TOLERANCES[kind]


@pytest.mark.parametrize("kind", [*OPTIMIZERS, *UNCUT])
def test_several_servers_of_each_stage_make_the_steps_of_one_process(kind: str, tmp_path: Path) -> None:
    network = {"data": 2, "pipeline": 2, "microbatches": 1, "split": "equal"}
    settings = staged_settings(network, {"consistency": "synchronous", "shards": 4}, **keys(kind))
    assert furthest(train_staged(task, settings, tmp_path).weights, alone(kind)) <= TOLERANCES[kind]


@pytest.mark.parametrize("kind", [*OPTIMIZERS, *UNCUT])
def test_servers_of_workers_that_split_layers_make_the_steps_of_one_process(kind: str, tmp_path: Path) -> None:
    network = {"data": 2, "tensor": 2, "microbatches": 1}
    settings = staged_settings(network, {"consistency": "synchronous", "shards": shards_of(kind)}, **keys(kind))
    assert furthest(train_staged(task, settings, tmp_path).weights, alone(kind)) <= TOLERANCES[kind]


@pytest.mark.parametrize("kind", [*OPTIMIZERS, *UNCUT])
def test_a_run_goes_on_with_other_servers_and_without(kind: str, tmp_path: Path) -> None:
    storage = {"checkpoint_storage": str(tmp_path / "saved"), "checkpoint_every_steps": 2}
    network = {"tensor": 2, "pipeline": 2, "microbatches": 1, "split": "equal"}
    staged = staged_settings(network, {"consistency": "synchronous", "shards": 4}, **keys(kind, 2))
    train_staged(task, replace(staged, **storage), tmp_path)
    (first,) = list_checkpoints(tmp_path / "saved")
    later = replace(synchronous(2, 4, kind=kind, shards=3), **storage)
    second = train_central(task, later, tmp_path, checkpoint=first)
    assert furthest(second.weights, alone(kind)) <= TOLERANCES[kind]
    last = list_checkpoints(tmp_path / "saved")[-1]
    settings = layout_settings({"microbatches": 1}, **keys(kind, 6))
    found = train_laid_out(task, settings, load=lambda: Loaded(last))
    assert furthest(found.weights, alone(kind, 6)) <= TOLERANCES[kind]


@pytest.mark.parametrize(
    ("kind", "shards", "text"),
    [
        ("soap", 9, "9 shards cannot share 8 parameters, which the optimizer has to see whole"),
        (UNCUT[0], 5, "5 shards cannot share 4 modules, whose parameters the optimizer has to see whole"),
    ],
)
def test_more_servers_than_there_is_to_hold_whole_are_refused(
    kind: str, shards: int, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        train_central(task, synchronous(2, kind=kind, shards=shards), tmp_path)


# -- what workers measure ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [{}, {"backup_workers": 1}, {"groups": 2}])
@pytest.mark.parametrize("kind", CURVATURE)
def test_a_server_steps_by_what_its_workers_measure_as_one_process(
    kind: str, exchange: dict[str, int], tmp_path: Path
) -> None:
    found = train_central(task, synchronous(3, kind=kind, **exchange), tmp_path)
    assert furthest(found.weights, alone(kind)) <= 1e-10


@pytest.mark.parametrize("kind", UNCUT)
def test_each_of_several_servers_steps_by_what_is_measured_of_its_layers(kind: str, tmp_path: Path) -> None:
    found = train_central(task, synchronous(2, kind=kind, shards=3), tmp_path)
    assert furthest(found.weights, alone(kind)) <= 1e-10


def test_a_run_goes_on_from_measurements_of_servers_without_them_and_back(tmp_path: Path) -> None:
    """Stop between two inversions, so that the factors in use are older than the last."""
    kind, storage = "kfac", {"checkpoint_storage": str(tmp_path / "saved"), "checkpoint_every_steps": 3}
    train_central(task, replace(synchronous(2, 3, kind=kind), **storage), tmp_path)
    saved = list_checkpoints(tmp_path / "saved")[-1]
    network = {"data": 2, "tensor": 2, "microbatches": 1}
    settings = layout_settings(network, {"shard": "optimizer"}, **keys(kind, 5))
    train_laid_out(
        task, settings, load=lambda: Loaded(saved), checkpoints=lambda: CheckpointWriter(tmp_path / "saved", keep=9)
    )
    last = list_checkpoints(tmp_path / "saved")[-1]
    found = train_central(task, synchronous(2, 8, kind=kind), tmp_path, checkpoint=last)
    assert furthest(found.weights, alone(kind, 8)) <= 1e-10


@pytest.mark.parametrize(("kind", "shards"), [("kfac", 1), *((kind, 2) for kind in UNCUT)])
def test_measurements_outlive_workers_and_servers(kind: str, shards: int, tmp_path: Path) -> None:
    settings = synchronous(2, 8, kind=kind, persist=True, shards=shards)
    wanted = train_central(task, settings, tmp_path / "whole").weights
    for name, train in {"worker": train_with_a_lost_worker, "servers": train_through_a_loss_of_all_servers}.items():
        assert same_bits(train(task, settings, tmp_path / name, after_lines=3).weights, wanted)


def test_what_gradients_are_compressed_by_leaves_measurements_as_they_are(tmp_path: Path) -> None:
    """Send gradients in half precision, which changes a step by about a thousandth."""
    settings = replace(synchronous(2, kind="kfac"), compression={"type": "float16"})
    found = train_central(task, settings, tmp_path)
    for name, weights in alone("kfac").items():
        assert (found.weights[name] - weights).norm() <= 1e-3 * weights.norm()
