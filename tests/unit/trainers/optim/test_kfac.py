"""K-FAC: its factors and steps against dense matrices, and the real loop under any number of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.kfac import KFAC
from orchestray.trainers.optim.kronecker import damped_inverses
from support.threads import run_replicas
from support.training import digits, few_digits, furthest, same_bits, settings_for, state_of, stream_of, train

DAMPING = 0.01
PLAIN = {"type": "kfac", "momentum": 0.0, "damping": DAMPING, "kl_clip": None, "inverse_every": 1}
CHOSEN = {"type": "kfac", "lr": 0.1, "inverse_every": 3, "statistics_every": 1}
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(4, 3), (6, 4)),
    "linear without a bias": (nn.Linear(4, 3, bias=False), (6, 4)),
    "convolution": (nn.Conv2d(2, 3, 2, stride=2, padding=1), (5, 2, 4, 4)),
}


def one_step(layer: nn.Module, inputs: Tensor, **changed: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Make one step at a rate of 1.

    Returns:
        The step and the gradient, each as a matrix with the bias as its last column, and each sample's own gradient of
        the output, `[out, places]`.
    """
    layer = layer.double()
    optimizer = make_optimizer(**{**PLAIN, "lr": 1.0, **changed})
    optimizer.watch(layer)
    optimizer.init(list(layer.named_parameters()))
    outputs = layer(inputs)
    outputs.retain_grad()
    (outputs.square().flatten(1).sum(1) / 2).mean().backward()
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    grads = [parameter.grad for parameter in layer.parameters()]
    optimizer.step(list(layer.parameters()), grads, 1.0)
    moves = [old - new.detach() for old, new in zip(before, layer.parameters(), strict=True)]
    each = [len(inputs) * grad.reshape(outputs.shape[1], -1) for grad in outputs.grad]
    return matrix(moves), matrix([grad for grad in grads if grad is not None]), each


def matrix(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], dim=1)


def patches(layer: nn.Module, sample: Tensor) -> Tensor:
    """Return what a layer multiplies with its weights for one sample, a column a place, by loops."""
    columns = [sample]
    if isinstance(layer, nn.Conv2d):
        padded = nn.functional.pad(sample, (1, 1, 1, 1))
        columns = [padded[:, y : y + 2, x : x + 2].reshape(-1) for y in (0, 2, 4) for x in (0, 2, 4)]
    stacked = torch.stack(columns, dim=1)
    return stacked if layer.bias is None else torch.cat([stacked, torch.ones(1, stacked.shape[1]).double()])


@pytest.mark.parametrize("kind", LAYERS)
def test_the_step_is_the_gradient_times_the_dense_inverse_of_the_kronecker_product(kind: str) -> None:
    layer, shape = LAYERS[kind]
    inputs = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    move, gradient, each = one_step(layer, inputs)
    columns = [patches(layer, sample) for sample in inputs]
    num_places = columns[0].shape[1]
    of_inputs = torch.stack([c @ c.T for c in columns]).mean(dim=0)
    of_outputs = torch.stack([g @ g.T for g in each]).mean(dim=0) / num_places
    pi = ((of_inputs.trace() / len(of_inputs)) / (of_outputs.trace() / len(of_outputs))).sqrt()
    first = of_inputs + pi * DAMPING**0.5 * torch.eye(len(of_inputs)).double()
    second = of_outputs + DAMPING**0.5 / pi * torch.eye(len(of_outputs)).double()
    dense = torch.linalg.inv(torch.kron(second, first)) @ gradient.reshape(-1)
    assert float((move.reshape(-1) - dense).abs().max()) < 1e-10 * float(dense.abs().max())
    assert float((move - gradient).abs().max()) > 0.1 * float(move.abs().max())  # not a step of SGD


def test_factors_of_one_sample_are_its_curvature_exactly() -> None:
    torch.manual_seed(0)
    layer, sample = nn.Linear(4, 3), torch.randn(1, 4, dtype=torch.float64)
    move, gradient, _ = one_step(layer, sample, damping=1e-8)
    # The Fisher matrix of one sample is the outer product of its gradient, which its inverse maps to 1 / its norm.
    along = float((move * gradient).sum() / gradient.square().sum())
    assert along == pytest.approx(1 / float(gradient.square().sum()), rel=1e-3)


def test_inverses_of_float32_factors_are_right_to_1e_6() -> None:
    draw = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    factors = draw.T @ draw / 40, 3.0 * (draw[:, :5].T @ draw[:, :5]) / 40
    inverses = damped_inverses(factors, 1.0)
    pi = float((factors[0].trace() / 12) / (factors[1].trace() / 5)) ** 0.5
    for factor, inverse, shift in zip(factors, inverses, (pi, 1 / pi), strict=True):
        product = (factor.double() + shift * torch.eye(len(factor)).double()) @ inverse.double()
        assert float((product - torch.eye(len(factor))).abs().max()) < 1e-6


def test_a_step_changes_the_outputs_by_at_most_kl_clip() -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(4, 3), torch.randn(6, 4, dtype=torch.float64)
    state = {name: value.clone() for name, value in layer.double().state_dict().items()}
    free, gradient, _ = one_step(layer, inputs)
    layer.load_state_dict(state)
    clipped, _, _ = one_step(layer, inputs, kl_clip=1e-4)
    assert float((free * gradient).sum()) > 1e-4
    scale = (1e-4 / float((free * gradient).sum())) ** 0.5
    assert torch.allclose(clipped, scale * free, rtol=1e-9)


# -- in the loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_three_replicas_are_the_single_process(model: str) -> None:
    task = few_digits() if model == "mlp" else few_digits(model="cnn", hidden=[4, 6])
    (one,) = train(task, optimizer=CHOSEN, steps=5, accumulate=2)
    for replica in train(task, 3, optimizer=CHOSEN, steps=5, accumulate=2):
        assert furthest(replica.after, one.after) < 1e-6
        assert furthest(replica.optimizer[-1], one.optimizer[-1]) < 1e-6
    (plain,) = train(task, optimizer={"type": "sgd", "lr": 0.1, "momentum": 0.9}, steps=5, accumulate=2)
    assert furthest(plain.after, one.after) > 1e-3


@pytest.mark.parametrize("inverse_workers", [0.0, 0.5])
def test_replicas_that_hold_some_inverses_alone_are_the_single_process(inverse_workers: float) -> None:
    task, chosen = few_digits(), {**CHOSEN, "inverse_workers": inverse_workers}
    (one,) = train(task, optimizer=CHOSEN, steps=4)
    held = []
    for run in train(task, 4, optimizer=chosen, steps=4):
        assert furthest(run.after, one.after) < 1e-6
        assert isinstance(run.replica.optimizer, KFAC)
        held.append(run.replica.optimizer.held_inverses())
    owners = {0.0: 1, 0.5: 2}[inverse_workers]
    layers = ["0.weight", "2.weight", "4.weight"]
    assert {layer: sum(layer in own for own in held) for layer in layers} == dict.fromkeys(layers, owners)
    assert len(set(held)) > 1


@pytest.mark.parametrize("stop_at", [3, 4])
def test_a_run_resumes_bit_for_bit_at_fresh_inverses_and_between(stop_at: int, tmp_path: Path) -> None:
    task = few_digits()
    whole = train(task, 2, optimizer=CHOSEN, steps=6)[0]
    with CheckpointWriter(str(tmp_path), keep=1) as writer:
        train(task, 2, optimizer=CHOSEN, steps=stop_at, checkpoints=writer)
        writer.wait()
    found, _ = latest_good(str(tmp_path))
    assert found is not None
    for rest in train(task, 2, optimizer=CHOSEN, steps=6, load=lambda: Loaded(found)):
        assert same_bits(rest.after, whole.after)
        assert same_bits(rest.optimizer[-1], whole.optimizer[-1])


def test_inverses_are_at_most_as_old_as_inverse_every_says() -> None:
    (run,) = train(few_digits(), optimizer=CHOSEN, steps=7)
    assert [line["inverse_age"] for line in run.steps] == [0, 1, 2, 0, 1, 2, 0]


def test_a_new_replica_goes_on_with_inverses_that_only_a_lost_one_held() -> None:
    chosen, task = {**CHOSEN, "inverse_workers": 0.0}, few_digits()
    whole = train(task, 2, optimizer=chosen, steps=6)[0]
    survivor = train(task, 2, optimizer=chosen, steps=4)[0].replica
    survivor.settings = settings = settings_for(2, optimizer=chosen, steps=6)
    new = Replica(task, settings, stream_of(task, settings))

    def body(collective: Collective) -> Replica:
        replica = survivor if collective.rank == 1 else new
        assert replica.connect(collective) == 4
        replica.run(started_at=0.0)
        return replica

    for replica in run_replicas(2, body):
        assert same_bits(state_of(replica.model), whole.after)


def test_a_step_that_a_lost_replica_breaks_changes_nothing() -> None:
    def body(collective: Collective) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        optimizer = make_optimizer(**PLAIN, lr=1.0)
        optimizer.watch(layer)
        optimizer.init(list(layer.named_parameters()))
        optimizer.join(collective)
        collective.barrier()
        if collective.rank == 1:
            collective.abort()
            return
        layer(torch.ones(2, 4)).sum().backward()
        before, state = state_of(layer), {key: value.clone() for key, value in optimizer.state_tensors().items()}
        with pytest.raises(PeerLostError):
            optimizer.step(list(layer.parameters()), [parameter.grad for parameter in layer.parameters()], 1.0)
        assert same_bits(state_of(layer), before)
        assert same_bits(optimizer.state_tensors(), state)

    run_replicas(2, body)


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_kfac_needs_fewer_steps_than_sgd_at_the_same_large_batch() -> None:
    def steps(optimizer: dict[str, Any]) -> float:
        """Return the mean number of steps to an accuracy of 95 %; 50 where a run does not get there."""
        goal = {"until": {"metric": "accuracy", "value": 0.95}, "validate_every_steps": 1, "steps": 50}
        chosen = {"optimizer": optimizer, "batch_size": 512, "precision": "float32", **goal}
        runs = (train(digits(hidden=[64, 64]), seed=seed, **chosen)[0] for seed in range(2))
        return float(np.mean([run.outcome.step for run in runs]))

    by_sgd = min(steps({"type": "sgd", "lr": lr, "momentum": 0.9}) for lr in (0.2, 0.3, 0.45))
    by_kfac = steps({"type": "kfac", "lr": 0.1, "kl_clip": 0.01, "inverse_every": 5})
    assert by_sgd < 50
    assert by_kfac < 0.6 * by_sgd
