"""SOAP: AdamW in a basis, bases that follow the eigenvectors, and replicas against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.optim.factory import make_optimizer
from support.layouts import LaidOut, layout_settings, train_and_keep, train_laid_out
from support.training import digits, furthest, same_bits, train

LR = 0.01


def test_soap_is_adamw_in_a_turned_basis_and_adamw_itself_for_what_is_no_matrix() -> None:
    """Turn a problem whose gradients have the axes as eigenvectors: the steps are AdamW's, turned."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q for n in (4, 4))
    plain, bias = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    weight, own_bias = left @ plain @ right.T, bias.clone()
    optimizer = make_optimizer("soap", lr=LR, betas=[0.9, 0.9], every_steps=1)
    optimizer.init([("weight", weight), ("bias", own_bias)])
    adamw = torch.optim.AdamW([plain, bias], lr=LR, betas=(0.9, 0.9), weight_decay=0.01)
    axes = torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)
    before: torch.Tensor | None = None
    for step in range(200):
        plain.grad = torch.diag(axes * (1.0 + 0.5 * torch.rand(4, generator=generator, dtype=torch.float64)))
        bias.grad = torch.randn(3, generator=generator, dtype=torch.float64)
        optimizer.step([weight, own_bias], [left @ plain.grad @ right.T, bias.grad], LR)
        adamw.step()
        if step == 150:  # the bases have found the eigenvectors
            before = (left.T @ weight @ right).diag() - plain.diag()
    assert torch.allclose(own_bias, bias, rtol=1e-9)
    assert before is not None
    assert torch.allclose((left.T @ weight @ right).diag() - plain.diag(), before, rtol=0, atol=1e-3 * LR)
    bases = optimizer.state_tensors()
    assert torch.allclose((left.T @ bases["weight.left_basis"]).abs(), torch.eye(4, dtype=torch.float64), atol=1e-3)
    assert torch.allclose((right.T @ bases["weight.right_basis"]).abs(), torch.eye(4, dtype=torch.float64), atol=1e-3)


def test_a_side_above_the_largest_size_keeps_its_own_axes() -> None:
    """Turn only the left side of a problem whose gradients have the axes as left eigenvectors."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    plain = torch.zeros(4, 6, dtype=torch.float64)
    weight = left @ plain
    optimizer = make_optimizer("soap", lr=LR, betas=[0.9, 0.9], every_steps=1, max_size=5)
    optimizer.init([("weight", weight)])
    adamw = torch.optim.AdamW([plain], lr=LR, betas=(0.9, 0.9), weight_decay=0.01)
    axes = torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)
    for step in range(200):
        plain.grad = torch.zeros(4, 6, dtype=torch.float64)
        plain.grad.diagonal().copy_(axes * (1.0 + 0.5 * torch.rand(4, generator=generator, dtype=torch.float64)))
        optimizer.step([weight], [left @ plain.grad], LR)
        adamw.step()
        if step == 150:  # the basis has found the eigenvectors
            before = (left.T @ weight - plain).diagonal()
    assert torch.allclose((left.T @ weight - plain).diagonal(), before, rtol=0, atol=1e-3 * LR)
    bases = optimizer.state_tensors()
    assert torch.allclose((left.T @ bases["weight.left_basis"]).abs(), torch.eye(4, dtype=torch.float64), atol=1e-3)
    assert "weight.right_basis" not in bases


def test_a_matrix_in_bfloat16_moves_as_one_in_float32_up_to_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(6, 4, generator=generator).bfloat16() for _ in range(5)]

    def moved(dtype: torch.dtype) -> torch.Tensor:
        weight = torch.zeros(6, 4, dtype=dtype)
        optimizer = make_optimizer("soap", lr=LR, every_steps=2)
        optimizer.init([("weight", weight)])
        for gradient in gradients:
            optimizer.step([weight], [gradient.to(dtype)], LR)
        return weight.float()

    assert torch.allclose(moved(torch.bfloat16), moved(torch.float32), rtol=0, atol=0.1 * LR)


def test_a_direction_that_has_no_gradient_but_rounding_stays_where_it_is() -> None:
    """Use gradients whose columns add up to nothing, as those of the last layer before a softmax do."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(10, 32)
    optimizer = make_optimizer("soap", lr=LR, weight_decay=0.0, every_steps=3)
    optimizer.init([("weight", weight)])
    for _ in range(20):
        gradient = torch.randn(10, 32, generator=generator)
        optimizer.step([weight], [gradient - gradient.mean(0)], LR)
    assert float(weight.abs().max()) > LR
    assert float(weight.mean(0).abs().max()) < 1e-3 * LR


def test_small_gradients_of_inputs_that_are_small_are_no_rounding() -> None:
    """Scale a column of the gradients by 1e-5, which has its own digits: it moves as the others."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(6, 4)
    optimizer = make_optimizer("soap", lr=LR, weight_decay=0.0, every_steps=3)
    optimizer.init([("weight", weight)])
    for _ in range(20):
        optimizer.step([weight], [torch.randn(6, 4, generator=generator) * torch.tensor([1.0, 1.0, 1.0, 1e-5])], LR)
    of_column = weight.norm(dim=0)
    assert float(of_column[3]) > 0.2 * float(of_column[:3].mean())


@pytest.mark.parametrize("betas", [[0.95, 0.95], [0.9, 0.99]])
def test_no_step_is_longer_than_adam_s_where_a_basis_has_turned(betas: list[float]) -> None:
    """Move by gradients of low rank: in a new basis, entries have signal that had next to none."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(8, 6, dtype=torch.float64)
    optimizer = make_optimizer("soap", lr=LR, betas=betas, weight_decay=0.0, every_steps=4)
    optimizer.init([("weight", weight)])
    longest = 0.0
    for step in range(1, 40):
        left, right = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((8, 2), (2, 6)))
        before = weight.clone()
        optimizer.step([weight], [left @ right], LR)
        state = optimizer.state_tensors()
        entries = state["weight.left_basis"].T @ (weight - before) @ state["weight.right_basis"] / LR
        # Cauchy and Schwarz: the square of a mean is at most this times the mean of the squares.
        of_mean = torch.tensor([(1 - betas[0]) * betas[0] ** k for k in range(step)], dtype=torch.float64)
        of_squares = torch.tensor([(1 - betas[1]) * betas[1] ** k for k in range(step)], dtype=torch.float64)
        of_mean, of_squares = of_mean / of_mean.sum(), of_squares / of_squares.sum()
        most = float((of_mean.square() / of_squares).sum().sqrt())
        longest = max(longest, float(entries.abs().max()) / most)
    assert 0.99 < longest <= 1.0 + 1e-9


CUTS: list[tuple[dict[str, int], dict[str, str]]] = [
    ({"data": 2, "tensor": 2}, {}),
    ({"pipeline": 2, "tensor": 2}, {}),
    ({"data": 3}, {"shard": "optimizer"}),
    ({"data": 2}, {"shard": "gradients"}),
    ({"data": 2}, {"shard": "parameters"}),
]
"""Layouts that cut matrices: keys of `strategy.network` and of `strategy.exchange`."""


def task() -> Any:
    return digits(hidden=[12, 10], validation_fraction=0.02)


def settings_of(
    network: Any = None, exchange: Any = None, *, steps: int = 4, precision: str = "float64"
) -> ReplicaSettings:
    optimizer = {"type": "soap", "lr": LR, "every_steps": 2, "max_size": 40}
    return layout_settings(network, exchange, optimizer=optimizer, steps=steps, precision=precision)


def trained(network: Any = None, exchange: Any = None, **rest: Any) -> LaidOut:
    return train_laid_out(task, settings_of(network, exchange, **rest))


@pytest.fixture(scope="module")
def alone() -> LaidOut:
    return trained()


def test_three_replicas_make_the_steps_of_one_process(alone: LaidOut) -> None:
    assert furthest(trained({"data": 3}).weights, alone.weights) <= 1e-6


@pytest.mark.parametrize("data", [2, 3])
def test_replicas_in_float32_differ_from_one_process_by_less_than_a_thousandth_of_a_step(data: int) -> None:
    one, found = (trained(network, steps=20, precision="float32") for network in ({}, {"data": data}))
    assert furthest(found.weights, one.weights) <= 1e-3 * LR


@pytest.mark.parametrize(("network", "exchange"), CUTS)
def test_layouts_that_cut_matrices_make_the_steps_of_one_process(
    network: dict[str, int], exchange: dict[str, str], alone: LaidOut
) -> None:
    assert furthest(trained(network, exchange).weights, alone.weights) <= 1e-6


@pytest.mark.parametrize(
    ("network", "exchange"),
    [
        *CUTS,
        ({"data": 2}, {}),
        ({"data": 2}, {"type": "averaging", "every": 2}),
        ({"data": 2, "tensor": 2}, {"type": "averaging", "every": 2}),
    ],
)
def test_a_run_resumes_exactly(network: dict[str, int], exchange: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_of(network, exchange, steps=5)
    whole, load = train_and_keep(task, settings, tmp_path, 3)
    resumed = train_laid_out(task, settings, load=load)
    assert len(resumed.losses) == 2
    assert same_bits(resumed.weights, whole.weights)


@pytest.mark.parametrize("network", [{"data": 2, "pipeline": 2}, {"data": 2, "tensor": 2}])
def test_groups_beside_an_average_resume_exactly(network: dict[str, int], tmp_path: Path) -> None:
    groups = [{"match": "*.bias", "weight_decay": 0.0}]
    optimizer = {"type": "soap", "lr": LR, "every_steps": 2, "groups": groups}
    settings = layout_settings(network, optimizer=optimizer, average={"type": "ema", "decay": 0.5}, steps=5)
    whole, load = train_and_keep(task, settings, tmp_path, 3)
    assert same_bits(train_laid_out(task, settings, load=load).weights, whole.weights)


def test_groups_share_the_decompositions_as_one_optimizer_does() -> None:
    groups = [{"match": "*.bias", "weight_decay": 0.0}]

    def broadcasts(**keys: Any) -> list[tuple[str, int]]:
        optimizer = {"type": "soap", "lr": LR, "every_steps": 1, **keys}
        calls = train(digits(hidden=[12, 10]), 2, optimizer=optimizer, steps=2)[0].calls
        return [call for call in calls if call[0] == "broadcast"]

    assert broadcasts(groups=groups) == broadcasts() != []
