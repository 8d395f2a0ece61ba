"""Muon for matrices beside AdamW for the rest, against the two classes of torch."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.optim.factory import make_optimizer
from support.configs import GOOD, problems_of
from support.layouts import LaidOut, layout_settings, train_and_keep, train_laid_out
from support.training import digits, furthest, regression, same_bits

LR = 0.02


def test_matrices_move_as_by_torchs_muon_and_all_else_as_by_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding.weight": (5, 4), "0.weight": (4, 6), "0.bias": (4,), "1.weight": (2, 3, 3, 3)}
    named = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    theirs = {name: tensor.clone() for name, tensor in named.items()}
    optimizer = make_optimizer("muon", lr=LR)
    optimizer.init(named.items())
    muon = torch.optim.Muon([theirs["0.weight"]], lr=LR, adjust_lr_fn="match_rms_adamw")
    rest = [tensor for name, tensor in theirs.items() if name != "0.weight"]
    adamw = torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(5):
        grads = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        optimizer.step(list(named.values()), list(grads.values()), LR)
        for name, tensor in theirs.items():
            tensor.grad = grads[name]
        muon.step()
        adamw.step()
    assert same_bits(named, theirs)


def task() -> Any:
    return digits(hidden=[12, 10], validation_fraction=0.02)


def settings_of(network: Any = None, exchange: Any = None, steps: int = 5) -> ReplicaSettings:
    return layout_settings(network, exchange, optimizer={"type": "muon", "lr": LR}, steps=steps)


@pytest.fixture(scope="module")
def alone() -> LaidOut:
    return train_laid_out(task, settings_of())


@pytest.mark.parametrize(
    ("network", "exchange"),
    [
        ({"data": 2}, {}),
        ({"data": 2, "tensor": 2}, {}),
        ({"pipeline": 2, "tensor": 2}, {}),
        ({"data": 3}, {"shard": "optimizer"}),
        ({"data": 2}, {"shard": "gradients"}),
        ({"data": 2}, {"shard": "parameters"}),
    ],
)
def test_layouts_make_the_steps_of_one_process_and_resume_exactly(
    network: dict[str, int], exchange: dict[str, str], alone: LaidOut, tmp_path: Path
) -> None:
    settings = settings_of(network, exchange)
    whole, load = train_and_keep(task, settings, tmp_path, 3)
    assert furthest(whole.weights, alone.weights) <= 1e-10
    resumed = train_laid_out(task, settings, load=load)
    assert len(resumed.losses) == 2
    assert same_bits(resumed.weights, whole.weights)


def test_a_tied_weight_of_several_stages_moves_by_the_optimizer_of_its_first_name() -> None:
    class Tied(nn.Sequential):
        def __init__(self) -> None:
            torch.manual_seed(0)
            middle = {str(number): nn.Linear(5, 5) for number in range(4)}
            super().__init__(OrderedDict(embed=nn.Linear(5, 5), **middle, out=nn.Linear(5, 5), last=nn.Linear(5, 1)))
            self.out.weight = self.embed.weight

    rows = regression()
    rows.build_model = Tied  # type: ignore[method-assign]
    alone, together = (
        train_laid_out(lambda: rows, layout_settings(network, optimizer={"type": "muon", "lr": LR}, steps=4)).weights
        for network in ({}, {"pipeline": 2})
    )
    assert furthest(together, alone) <= 1e-10


def test_a_run_goes_on_in_another_layout(alone: LaidOut, tmp_path: Path) -> None:
    layouts: list[tuple[dict[str, int], dict[str, str]]] = [
        ({"data": 3}, {"shard": "optimizer"}),
        ({"data": 2, "tensor": 2}, {}),
        ({}, {}),
    ]
    for steps, (network, exchange) in zip((1, 3, 5), layouts, strict=True):
        found, _ = latest_good(tmp_path)
        load = None if found is None else lambda found=found: Loaded(found)
        settings = settings_of(network, exchange, steps)
        last = train_laid_out(task, settings, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1), load=load)
    assert furthest(last.weights, alone.weights) <= 1e-10


def test_it_resumes_exactly_as_an_outer_optimizer(tmp_path: Path) -> None:
    exchange = {"type": "averaging", "every": 2, "outer_optimizer": {"type": "muon", "lr": LR}}

    def run(steps: int, **rest: Any) -> LaidOut:
        settings = layout_settings({"data": 2}, exchange, steps=steps)
        return train_laid_out(lambda: digits(hidden=[12, 10], validation_fraction=0.02), settings, **rest)

    whole = run(5)
    run(3, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))
    found, _ = latest_good(tmp_path)
    assert found is not None
    assert same_bits(run(5, load=lambda: Loaded(found)).weights, whole.weights)


def test_muon_refuses_groups_as_it_has_its_own() -> None:
    (problem,) = problems_of(GOOD, "train.optimizer={type: muon, lr: 0.1, groups: [{match: '*', lr: 1.0}]}")
    assert "muon has groups of its own" in problem
