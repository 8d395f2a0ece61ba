"""A model with parameters of every awkward kind, and its training by replicas that shard it, or by one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.data.even_split import split_evenly
from orchestray.trainers.core.exchange import Exchange
from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.optim.clipping import SpreadSums
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.sync.allreduce.allreduce import AllReduce
from support.threads import run_replicas

BATCHES = (12, 12, 7, 12, 2)
"""Samples of each step's batch: the short ones leave replicas with fewer micro-batches, or none."""
ACCUMULATE = 2
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "weight_decay": 0.01},
    "adagrad": {},
    "rmsprop": {"momentum": 0.5},
    "adam": {"weight_decay": 0.01},
    "adamw": {},
    "lars": {"momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02},
}
LR = {"sgd": 0.05, "lars": 0.5}
INPUTS, OUTPUTS = 6, 4


class Awkward(nn.Module):
    """A model of parameters that are tied, frozen, rarely used, unused, scalar, of one row, or not contiguous.

    First dimensions are uneven.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 11)
        self.hidden = nn.Linear(11, 11)
        self.tied = nn.Linear(11, 11, bias=False)
        self.tied.weight = self.hidden.weight
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.rare = nn.Linear(INPUTS, 11)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.one_row = nn.Parameter(torch.randn(1, 11))
        self.never = nn.Parameter(torch.ones(3))
        self.turned = nn.Parameter(torch.randn(OUTPUTS, 11).t())

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(torch.tanh(self.first(x))) * self.scale + self.one_row
        chosen = x[:, 0] > 0.9
        if chosen.any():
            h = h.index_add(0, chosen.nonzero()[:, 0], self.rare(x[chosen]))
        return self.tied(torch.tanh(self.hidden(h))) @ self.turned


def awkward() -> Awkward:
    torch.manual_seed(0)
    return Awkward().double()


def of_whole_registers() -> nn.Sequential:
    """Return a model of which halves of the rows fill vector registers, so that kernels round all of them alike."""
    torch.manual_seed(0)
    layers = [nn.Linear(INPUTS, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, OUTPUTS, bias=False)]
    return nn.Sequential(*layers).double()


def bits_of(exchange_of: Callable[[], Exchange], optimizer: str) -> dict[str, Tensor]:
    """Return weights and optimizer state of two replicas of `of_whole_registers` after five steps, put together."""
    plain = of_whole_registers()

    def replica(collective: Collective) -> dict[str, tuple[Any, Tensor]]:
        training = Training(copy.deepcopy(plain), exchange_of(), collective, optimizer)
        for step in range(1, len(BATCHES) + 1):
            training.step(step, accumulate=1)
        return training.parts()

    return put_together(run_replicas(2, replica))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a step; the third alone uses the layer `rare`, and not in every step."""
    generator = torch.Generator().manual_seed(step)
    num_samples = BATCHES[(step - 1) % len(BATCHES)]
    x = torch.randn(num_samples, INPUTS, generator=generator, dtype=torch.float64)
    x[:, 0] = 0.0
    if num_samples > 2 and step != 4:
        x[2, 0] = 1.0
    return x, torch.randn(num_samples, OUTPUTS, generator=generator, dtype=torch.float64)


def micro_batches(step: int, rank: int, size: int, accumulate: int = ACCUMULATE) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's part of each micro-batch of a step's batch, without the empty ones."""
    x, y = batch(step)
    parts = []
    for start, stop in split_evenly(len(x), accumulate):
        a, b = split_evenly(stop - start, size)[rank]
        if a < b:
            parts.append((x[start + a : start + b], y[start + a : start + b]))
    return parts


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = ((model(x) - y) ** 2).sum(1).mean()
    return loss


def backward(model: nn.Module, exchange: Exchange, parts: Sequence[tuple[Tensor, Tensor]], batch_samples: int) -> float:
    """Run a share forward and backward; return its part of the batch's loss."""
    total = 0.0
    for number, (x, y) in enumerate(parts, start=1):
        loss = loss_of(model, x, y) * (len(x) / batch_samples)
        exchange.begin_backward(number == len(parts))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


class Training:
    """One replica's model, exchange and optimizer."""

    def __init__(self, model: nn.Module, exchange: Exchange, collective: Collective, optimizer: str) -> None:
        self.model = model
        self.exchange = exchange
        self.collective = collective
        exchange.attach(model, collective)
        self.updates = exchange.updates()
        self.optimizer: Optimizer = make_optimizer(optimizer, **OPTIMIZERS[optimizer])
        self.optimizer.init((update.name, update.tensor) for update in self.updates)
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self.optimizer.norm_reducer = SpreadSums(self.updates, collective, dtypes).of
        self.lr = LR.get(optimizer, 0.01)
        self.losses: list[float] = []

    def step(self, step: int, accumulate: int = ACCUMULATE) -> None:
        exchange = self.exchange
        exchange.before_step(step)
        parts = micro_batches(step, self.collective.rank, self.collective.size, accumulate)
        loss = backward(self.model, exchange, parts, len(batch(step)[0]))
        self.losses += exchange.finish([loss])
        self.optimizer.step([update.tensor for update in self.updates], exchange.gradients(), self.lr)
        exchange.after_step(step)

    def parts(self) -> dict[str, tuple[Any, Tensor]]:
        """Return what this replica holds, as a checkpoint does: pieces and tensors of the model and the optimizer."""
        found = {name: (held.piece, held.tensor.clone()) for name, held in self.exchange.held().items()}
        state = self.optimizer.state_tensors()
        for update in self.updates:
            for slot in self.optimizer.slots:
                key = f"{update.name}.{slot}"
                if slot != "step" and key in state:
                    found[key] = update.piece, state[key].clone()
        return found


def put_together(parts: Sequence[Mapping[str, tuple[Any, Tensor]]]) -> dict[str, Tensor]:
    """Return the plain tensors that the replicas hold in pieces; elements nobody holds are NaN."""
    plain: dict[str, Tensor] = {}
    for held in parts:
        for name, (piece, tensor) in held.items():
            if name not in plain:
                plain[name] = torch.full(piece.shape, torch.nan, dtype=torch.float64)
            assert tensor.shape == piece.local_shape
            if piece.is_counted:
                piece.put(plain[name], tensor.double())
    return plain


def trained_alone(
    model: nn.Module, optimizer: str, num_steps: int = len(BATCHES)
) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights, optimizer state and losses of one process that sees the whole batches."""
    training = Training(copy.deepcopy(model), AllReduce(), SoloCollective(), optimizer)
    for step in range(1, num_steps + 1):
        training.step(step)
    plain = put_together([training.parts()])
    assert set(model_tensors(model)) <= set(plain)
    return plain, training.losses


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-12) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        apart = (found[name] - value).abs().max()
        assert apart <= tolerance * (1 + value.abs().max()), f"{name}: {float(apart)} apart"
