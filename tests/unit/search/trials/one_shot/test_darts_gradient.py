"""The architecture's gradient as a trial of DARTS takes it, against finite differences in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from orchestray.search.trials.one_shot.darts import DartsTrial
from orchestray.trainers.optim.optimizers import SGD
from support.mixed_space import mixed_config

torch.set_num_threads(1)

LR, STEP = 0.05, 3
DELTA = 1e-5


def trial_of(order: int) -> DartsTrial:
    """Return a trial in float64 whose architecture moves by its whole gradient and differs between the operations."""
    config = mixed_config(steps=10, precision="float64", optimizer={"type": "sgd", "lr": LR})
    trial = DartsTrial(config, order=order, seed=0, finalists=1, architecture_part=0.5)
    generator = torch.Generator().manual_seed(1)
    for parameter in trial._params:
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    for alpha in trial.alphas.values():
        alpha.copy_(torch.randn(alpha.shape, generator=generator, dtype=torch.float64))
    trial._alpha_optimizer, trial._alpha_lr = SGD(), 1.0
    trial._alpha_optimizer.init(trial.alphas.items())
    return trial


def loss_after_a_step(trial: DartsTrial, alphas: dict[str, Tensor], order: int) -> float:
    """Return the loss on the architecture's batch; of second order after the weights have made a step on theirs."""
    trained, judged = (trial._cast(batches.at(STEP - 1)) for batches in (trial._trained_on, trial._judged_by))

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return trial._task.loss(trial.supernet.forward_mixed(batch["inputs"], alphas), batch)

    before = [parameter.detach().clone() for parameter in trial._params]
    try:
        if order == 2:
            grads = torch.autograd.grad(loss(trained), trial._params)
            for parameter, grad in zip(trial._params, grads, strict=True):
                parameter.data.sub_(LR * grad)
        return float(loss(judged).detach())
    finally:
        for parameter, value in zip(trial._params, before, strict=True):
            parameter.data.copy_(value)


def differences(trial: DartsTrial, order: int) -> Tensor:
    """Return the finite differences of that loss in each number of the architecture."""
    alphas = {name: alpha.clone() for name, alpha in trial.alphas.items()}
    found = []
    for alpha in alphas.values():
        flat = alpha.view(-1)
        for place in range(flat.numel()):
            losses = []
            for sign in (1, -1):
                kept = flat[place].clone()
                flat[place] += sign * DELTA
                losses.append(loss_after_a_step(trial, alphas, order))
                flat[place] = kept
            found.append((losses[0] - losses[1]) / (2 * DELTA))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(("order", "tolerance"), [(1, 1e-8), (2, 1e-4)])
def test_the_architecture_moves_by_the_finite_differences_of_the_loss_after_a_step_of_the_weights(
    order: int, tolerance: float
) -> None:
    trial = trial_of(order)
    with trial._trained_on, trial._judged_by:
        expected, of_other_order = differences(trial, order), differences(trial, 3 - order)
        weights = [parameter.detach().clone() for parameter in trial._params]
        before = torch.cat([alpha.flatten() for alpha in trial.alphas.values()])
        trial._update_architecture(trial._cast(trial._trained_on.at(STEP - 1)), STEP)
    moved = before - torch.cat([alpha.flatten() for alpha in trial.alphas.values()])
    torch.testing.assert_close(moved, expected, atol=tolerance, rtol=0.0)
    assert float((moved - of_other_order).abs().max()) > 100 * tolerance
    assert all(torch.equal(now, then) for now, then in zip(trial._params, weights, strict=True))
