"""NG-SGD: the exact natural gradient where the Fisher matrix is known, and averages counted in samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.optim.natural_gradient import NaturalGradient
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.training import digits, furthest, same_bits

BATCH = 24
NUM_STEPS = 10
EVERY = 60


def test_a_step_of_a_linear_gaussian_model_is_the_rate_times_the_exact_inverse_fisher_times_the_gradient() -> None:
    """Model y ~ N(w x + b, 1): its Fisher matrix is the mean of a a^T, where a is x and a 1."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.float64)
    x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    optimizer = NaturalGradient(damping=1e-20)
    optimizer.prepare(model)
    optimizer.observe(model, {})
    optimizer.init(model.named_parameters())
    optimizer.join(SoloCollective())
    optimizer.begin_step(1, 50, 50)
    (0.5 * (model(x) - y).square()).mean().backward()  # the mean of -log p, but for a constant
    parameters = list(model.parameters())
    before = torch.cat([parameter.detach().flatten().clone() for parameter in parameters])
    gradient = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
    a = torch.cat([x, torch.ones(50, 1, dtype=torch.float64)], dim=1)
    fisher = a.T @ a / 50
    optimizer.step(parameters, [parameter.grad for parameter in parameters], 0.3)
    moved = torch.cat([parameter.detach().flatten() for parameter in parameters]) - before
    assert torch.allclose(moved, -0.3 * torch.linalg.solve(fisher, gradient), rtol=1e-8, atol=0)


def test_a_layer_whose_errors_are_zero_stays_where_it_is() -> None:
    """Start with a last layer of zeros, as many networks do: the layer below has no gradient in the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    nn.init.zeros_(model[1].weight)
    before = model[0].weight.detach().clone()
    optimizer = NaturalGradient()
    optimizer.prepare(model)
    optimizer.observe(model, {})
    optimizer.init(model.named_parameters())
    optimizer.join(SoloCollective())
    optimizer.begin_step(1, 4, 4)
    model(torch.randn(4, 4)).square().mean().backward()
    parameters = list(model.parameters())
    optimizer.step(parameters, [parameter.grad for parameter in parameters], 0.3)
    assert torch.equal(model[0].weight, before)
    assert bool(model[1].weight.abs().max() > 0)


def trained(data: int, exchange: dict[str, Any], steps: int = NUM_STEPS, pipeline: int = 1, **rest: Any) -> LaidOut:
    optimizer = {"type": "natural_gradient", "lr": 0.05, "every_steps": 3}
    network = {"data": data, "pipeline": pipeline}
    settings = layout_settings(network, exchange, optimizer=optimizer, batch_size=BATCH, steps=steps)
    return train_laid_out(lambda: digits(hidden=[12, 10], validation_fraction=0.02), settings, **rest)


def test_replicas_that_share_each_batch_make_the_steps_of_one_process() -> None:
    one, three = trained(1, {}, 5), trained(3, {}, 5)
    assert furthest(three.weights, one.weights) <= 1e-9


def test_weights_are_averaged_as_often_as_samples_pass_a_multiple_of_every() -> None:
    found = trained(2, {"type": "averaging", "every": EVERY, "unit": "samples"})
    meetings = [line["step"] for line in found.lines if "disagreement" in line]
    assert meetings == [3, 5, 8, 10]  # after 72, 120, 192 and 240 samples of both
    assert len(meetings) == NUM_STEPS * BATCH // EVERY


@pytest.mark.parametrize("pipeline", [1, 2])
def test_replicas_with_fisher_matrices_of_their_own_resume_exactly(pipeline: int, tmp_path: Path) -> None:
    exchange = {"type": "averaging", "every": EVERY, "unit": "samples"}
    whole = trained(2, exchange, pipeline=pipeline)
    trained(2, exchange, steps=7, pipeline=pipeline, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))
    saved, _ = latest_good(tmp_path)
    assert saved is not None
    resumed = trained(2, exchange, pipeline=pipeline, load=lambda: Loaded(saved))
    assert len(resumed.losses) == 3
    assert same_bits(resumed.weights, whole.weights)
