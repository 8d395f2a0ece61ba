"""The loss as a function of the weights: its derivatives are finite differences, and those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.solo import SoloCollective
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.loop.solver_oracle import SharedOracle
from orchestray.trainers.parallel.recompute import ActivationMeter
from orchestray.trainers.parallel.whole_model import WholeNetwork
from support.threads import run_replicas
from support.training import Rows, regression, settings_for, stream_of

SAMPLES = 22


def classes() -> Rows:
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(SAMPLES, 3))
    return Rows(inputs, rng.integers(0, 3, SAMPLES), lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))


def on_oracle(task: Rows, look: Callable[[SharedOracle], list[Tensor]], data: int, accumulate: int = 1) -> list[Tensor]:
    """Return what a look at the oracle of a whole batch finds, the same bits on each replica."""
    settings = settings_for(data, batch_size=SAMPLES, accumulate=accumulate, optimizer=None, solver={"type": "lbfgs"})
    replicas = [Replica(task, settings, stream_of(task, settings)) for _ in range(data)]

    def run(collective: Collective) -> list[Tensor]:
        replica = replicas[collective.rank]
        replica.connect(collective)
        stream = replica.stream("train")
        network = cast("WholeNetwork", replica.network)
        oracle = SharedOracle(network, replica.groups.data, stream, collective.rank)
        with stream.epoch(0) as shares:
            oracle.see(next(shares), 1)
            return look(oracle)

    if data == 1:
        return run(SoloCollective())
    found = run_replicas(data, run)
    assert all(torch.equal(mine, first) for one in found for mine, first in zip(one, found[0], strict=True))
    return found[0]


def everything(oracle: SharedOracle) -> list[Tensor]:
    x = oracle.weights() + 0.1
    v = torch.linspace(-1.0, 1.0, len(x), dtype=torch.float64)
    value, gradient = oracle.gradient(x)
    hessian, gauss_newton = oracle.hessian(x)(v), oracle.gauss_newton(x)(v)
    assert oracle.value(x) == pytest.approx(value, rel=1e-14)
    return [torch.tensor(value), gradient, hessian, gauss_newton, oracle.whole_gradient(x)]


@pytest.mark.parametrize("task", [regression(SAMPLES), classes()], ids=["squares", "classes"])
def test_gradient_and_hessian_are_finite_differences(task: Rows) -> None:
    def look(oracle: SharedOracle) -> list[Tensor]:
        x = oracle.weights()
        v = torch.linspace(-1.0, 1.0, len(x), dtype=torch.float64)
        slope = (oracle.value(x + 1e-5 * v) - oracle.value(x - 1e-5 * v)) / 2e-5
        assert slope == pytest.approx(float(oracle.gradient(x)[1] @ v), rel=1e-7)
        bend = (oracle.gradient(x + 1e-5 * v)[1] - oracle.gradient(x - 1e-5 * v)[1]) / 2e-5
        torch.testing.assert_close(oracle.hessian(x)(v), bend, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(oracle.hessian(x)(2 * v), 2 * bend, rtol=1e-6, atol=1e-8)
        return []

    on_oracle(task, look, 1)


def test_the_gauss_newton_matrix_is_that_of_the_jacobian_of_the_outputs() -> None:
    task = regression(SAMPLES)

    def look(oracle: SharedOracle) -> list[Tensor]:
        x = oracle.weights()
        rows = []
        batch = task.to_batch(task.table)
        for index in range(SAMPLES):
            model = oracle._network.model
            model.zero_grad()
            model(batch["inputs"][index : index + 1]).sum().backward()
            rows.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
        jacobian = torch.stack(rows)
        matrix = torch.stack([oracle.gauss_newton(x)(unit) for unit in torch.eye(len(x), dtype=torch.float64)])
        torch.testing.assert_close(matrix, 2 / SAMPLES * jacobian.T @ jacobian, rtol=1e-10, atol=1e-12)
        assert float(torch.linalg.eigvalsh(matrix).min()) > -1e-12
        return []

    on_oracle(task, look, 1)


class Hidden(nn.Module):
    """Two layers, whose answer has the hidden layer as well if it is to be seen."""

    def __init__(self, is_seen: bool) -> None:
        super().__init__()
        self.first, self.second, self._is_seen = nn.Linear(3, 4), nn.Linear(4, 3), is_seen

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(inputs))
        return {**({"hidden": hidden} if self._is_seen else {}), "logits": self.second(hidden)}


class OfLogits(Rows):
    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(outputs["logits"], batch)


def test_outputs_that_the_loss_does_not_see_change_no_gauss_newton_matrix() -> None:
    rows, found = classes(), []
    batch = rows.to_batch(rows.table)
    for is_seen in (False, True):
        task = OfLogits(batch["inputs"].numpy(), batch["targets"].numpy(), lambda seen=is_seen: Hidden(seen))
        found.append(on_oracle(task, everything, 1)[3])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


def test_of_a_model_linear_in_its_weights_the_gauss_newton_matrix_is_the_hessian() -> None:
    rng = np.random.default_rng(2)
    task = Rows(rng.normal(size=(SAMPLES, 3)), rng.integers(0, 3, SAMPLES), lambda: nn.Linear(3, 3))
    _, _, hessian, gauss_newton, _ = on_oracle(task, everything, 1)
    torch.testing.assert_close(hessian, gauss_newton, rtol=1e-10, atol=1e-12)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        each = self.first(inputs.unsqueeze(2)).unsqueeze(1)
        mixed = nn.functional.scaled_dot_product_attention(each, each, each)
        answer: Tensor = self.last(mixed[:, 0].mean(1))
        return answer


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(5, 4, sparse=True), nn.Linear(12, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        answer: Tensor = self.last(self.words(inputs.abs().long().clamp(max=4)).flatten(1))
        return answer


@pytest.mark.parametrize("made", [Attention, Words])
def test_products_are_there_for_fused_attention_and_sparse_gradients(made: type[nn.Module]) -> None:
    rows = classes()
    batch = rows.to_batch(rows.table)
    task = Rows(batch["inputs"].numpy(), batch["targets"].numpy(), made)

    def look(oracle: SharedOracle) -> list[Tensor]:
        x = oracle.weights()
        v = torch.linspace(-1.0, 1.0, len(x), dtype=torch.float64)
        bend = (oracle.gradient(x + 1e-5 * v)[1] - oracle.gradient(x - 1e-5 * v)[1]) / 2e-5
        with ActivationMeter(oracle._network.model).watching():
            torch.testing.assert_close(oracle.hessian(x)(v), bend, rtol=1e-6, atol=1e-8)
            assert float(oracle.gauss_newton(x)(v) @ v) > 0
        return []

    on_oracle(task, look, 1)


@pytest.mark.parametrize("task", [regression(SAMPLES), classes()], ids=["squares", "classes"])
@pytest.mark.parametrize(("data", "accumulate"), [(3, 1), (2, 3), (1, 4)])
def test_replicas_and_micro_batches_find_what_one_process_finds(task: Rows, data: int, accumulate: int) -> None:
    alone = on_oracle(task, everything, 1)
    for own, shared in zip(alone, on_oracle(task, everything, data, accumulate), strict=True):
        torch.testing.assert_close(shared, own, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(alone[4], alone[1], rtol=1e-12, atol=1e-14)  # one batch is the whole data
