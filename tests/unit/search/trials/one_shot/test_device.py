"""Shared weights, and all that is computed with them, lie on the device of the trial.

It is torch's device `meta` here, which every machine has: its tensors have shapes and no values, and what mixes them
with others raises, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.search.methods.base import rng_of
from orchestray.search.spaces.registry import make_space
from orchestray.search.spaces.searched_task import searched_task_section
from orchestray.search.trials.one_shot import base
from orchestray.search.trials.one_shot.darts import DartsTrial
from orchestray.search.trials.one_shot.enas import EnasTrial
from orchestray.search.trials.one_shot.smash import SmashTrial
from orchestray.trainers.config.schema import TrainConfig

COMMON: dict[str, Any] = {"seed": 0, "finalists": 2, "architecture_part": 0.5}
ENAS: dict[str, Any] = {"controller_every": 1, "controller_steps": 1, "children": 2, "num_judged": 2}
OPERATIONS = ["identity", "max_3x3", "conv_1x1"]
CELL: dict[str, Any] = {"space": "cell", "nodes": 1, "channels": 2, "reductions": 0, "operations": OPERATIONS}
BANKS: dict[str, Any] = {"space": "memory_bank", "blocks": 2, "channels": [4]}
CHAIN: dict[str, Any] = {"space": "chain", "max_depth": 2, "channels": [2, 4], "widths": [4]}


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return the device that a trial finds; a tensor there gives the value of a 1."""
    for name, answer in (("__float__", 1.0), ("__bool__", True), ("__int__", 0), ("tolist", [])):
        of_others = getattr(Tensor, name)

        def asked(tensor: Tensor, answer: Any = answer, of_others: Any = of_others) -> Any:
            return answer if tensor.is_meta else of_others(tensor)

        monkeypatch.setattr(Tensor, name, asked)
    device = torch.device("meta")
    monkeypatch.setattr(base, "device_of", lambda settings: device)
    return device


def digits_config(architecture: dict[str, Any]) -> TrainConfig:
    name, arguments = architecture["space"], {key: value for key, value in architecture.items() if key != "space"}
    space = make_space(name, **arguments)
    section = searched_task_section({"type": "digits"}, architecture, space.sample(rng_of(0)))
    train = {"batch_size": 256, "steps": 4, "optimizer": {"type": "adam", "lr": 0.01}, "grad_clip": 1.0}
    return TrainConfig.model_validate({"name": "shared", "task": section, "train": train})


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
@pytest.mark.parametrize(
    ("program", "arguments", "architecture"),
    [
        (EnasTrial, ENAS, CELL),
        (EnasTrial, ENAS, CHAIN),
        (DartsTrial, {"warmup_part": 0.0, "order": 2}, CELL),
        (SmashTrial, {"num_judged": 2, "num_perturbed": 1}, BANKS),
    ],
    ids=lambda value: value.get("space", "") if isinstance(value, dict) else value.__name__,
)
def test_all_that_is_learned_is_on_the_device_also_after_a_state_from_elsewhere(
    meta: torch.device, program: Any, arguments: dict[str, Any], architecture: dict[str, Any]
) -> None:
    config = digits_config(architecture)
    trial = program(config, **COMMON, **arguments)
    assert trial.advance(2).step == 2, "trained, found, validated"
    state = trial.state()
    for name, tensor in state.tensors.items():
        state.tensors[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
    again = program(config, **COMMON, **arguments)
    again.load(state)
    again.advance(4)
    for one in (trial, again):
        places = {name: tensor.device for name, tensor in one.state().tensors.items()}
        others = {name for name, place in places.items() if place != meta}
        assert all(name.endswith(".step") or name.startswith("shared/controller/") for name in others), others
        assert len(others) < len(places)
