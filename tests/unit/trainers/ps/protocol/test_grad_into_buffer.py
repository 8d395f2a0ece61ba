"""Gradients of linear layers that are made where they are sent from: the bits of autograd, without a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.ps.protocol import partition
from orchestray.trainers.ps.protocol.partition import FlatModel
from support.central import Plan, Servers, Worker, train_central

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def every_layer_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "_LARGE_BYTES", 0)


class Twice(nn.Module):
    """A model of a layer that is used twice, one without a bias, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(30, 70), nn.Linear(70, 70)
        self.last, self.idle = nn.Linear(70, 5, bias=False), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.again(self.first(inputs).tanh()).tanh()
        return self.last(input=self.again(hidden))  # type: ignore[no-any-return]


def _gradients(
    run: Callable[[nn.Module, Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype, *, at_home: bool
) -> tuple[Tensor, Tensor, FlatModel, nn.Module]:
    torch.manual_seed(0)
    model = Twice().to(dtype)
    flat = FlatModel(model)
    if at_home:
        flat.make_gradients_at_home(model)
    for number in range(3):
        inputs = torch.randn(*shape, 30, dtype=dtype, generator=torch.Generator().manual_seed(number))
        inputs.requires_grad_()
        flat.begin()
        for _ in range(2):  # micro-batches
            run(model, inputs).square().mean().backward()  # type: ignore[no-untyped-call]
    assert inputs.grad is not None
    return flat.gradient.clone(), inputs.grad, flat, model


RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda model, inputs: model(inputs),
    "copied": lambda model, inputs: model(inputs) + copy.deepcopy(model)(inputs).detach(),
    "functional": lambda model, inputs: torch.func.functional_call(model, dict(model.named_parameters()), inputs),
    "vmapped": lambda model, inputs: torch.vmap(model)(inputs),
    "checkpointed": lambda model, inputs: torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=False),  # type: ignore[return-value]
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4,), (33,), (2, 9)], ids=str)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_gradients_made_at_home_have_the_bits_of_autograd(
    run: Callable[[nn.Module, Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    gathered, of_inputs, _, _ = _gradients(run, shape, dtype, at_home=False)
    made, made_of_inputs, _, _ = _gradients(run, shape, dtype, at_home=True)
    assert gathered.any()
    assert torch.equal(made, gathered)
    assert torch.equal(made_of_inputs, of_inputs)


def test_a_gradient_of_a_gradient_is_that_of_autograd() -> None:
    def run(model: nn.Module, inputs: Tensor) -> Tensor:
        return torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)[0]

    gathered, of_inputs, _, _ = _gradients(run, (4,), torch.float64, at_home=False)
    made, made_of_inputs, _, _ = _gradients(run, (4,), torch.float64, at_home=True)
    assert gathered.any()
    torch.testing.assert_close(made, gathered, rtol=1e-12, atol=1e-15)  # sums in another order
    torch.testing.assert_close(made_of_inputs, of_inputs, rtol=1e-12, atol=1e-15)


def test_the_gradients_of_weights_are_in_the_flat_one_already() -> None:
    _, _, flat, model = _gradients(RUNS["plain"], (4,), torch.float32, at_home=True)
    assert isinstance(model, Twice)
    inside = range(flat.gradient.data_ptr(), flat.gradient.data_ptr() + 4 * flat.gradient.numel())
    for layer in (model.first, model.last):  # that which is used twice has a sum
        assert layer.weight.grad is not None
        assert layer.weight.grad.data_ptr() in inside


def test_under_autocast_and_without_gradients_a_layer_is_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    FlatModel(model).make_gradients_at_home(model)
    inputs = torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(inputs).dtype == torch.bfloat16
    with torch.no_grad():
        assert not model(inputs).requires_grad
    assert model(inputs[0]).shape == (4,)


def test_layers_are_given_back_and_those_that_compute_in_their_own_way_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 3), Own(3, 3))
    flat = FlatModel(model)
    flat.make_gradients_at_home(model)
    assert ["forward" in vars(layer) for layer in model] == [True, False]
    flat.detach()
    assert not any("forward" in vars(layer) for layer in model)


@pytest.mark.parametrize("plan", [Plan(lends=True), Plan(), Plan("synchronous", shards=2, lends=True)], ids=str)
def test_a_worker_whose_gradients_are_made_at_home_trains_as_any_other(plan: Plan) -> None:
    gathered, losses, _ = train_central(plan)
    servers = Servers(plan)
    worker = Worker(plan, 0, servers.channels(0))
    worker.flat.make_gradients_at_home(worker.model)
    worker.run()
    worker.client.close()
    assert torch.equal(servers.values(), gathered)
    assert servers.losses() == losses
    servers.close()
