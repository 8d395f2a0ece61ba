"""A split model trained beside the plain one: what they compute must be the same."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.core.rng import RngKey, draws, seed_modules
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.parallel.tensor.base import Split, style_of
from orchestray.trainers.parallel.tensor.region import children_range
from support.threads import run_replicas

LR = 0.1
CLOSE = 1e-12


@dataclass
class Trained:
    """Results of some steps of a model; those of the last step, unless a field says otherwise."""

    outputs: Tensor
    losses: list[float]
    input_gradient: Tensor | None
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    """Parameters and buffers after all steps."""
    bytes_sent: int = 0
    """In the last forward and backward pass."""
    num_held: int = 0
    """Elements of the parameters of this worker."""
    split: Split | None = None


@dataclass
class Run:
    """Settings of the training of a model."""

    inputs: Tensor
    loss: Callable[[Tensor], Tensor] = field(default_factory=lambda: _weighted)
    num_steps: int = 2
    train: bool = True
    inputs_need_gradient: bool = True
    before: Callable[[nn.Module, Collective], Any] = field(default=lambda *_: None)
    """Called with the split model before the first step."""


def _weighted(outputs: Tensor) -> Tensor:
    """Return a loss with an unlike gradient for every output."""
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view(outputs.shape)
    return (outputs * weights).sum() + (outputs**2).mean()


def train_plain(model: nn.Module, run: Run) -> Trained:
    """Train the model in one process."""
    return _train(copy.deepcopy(model), run, lambda: None, {}, lambda: 0)


Meet = Callable[[int, Callable[[Collective], Trained]], list[Trained]]
"""Runs a function in each member of a group of a size; returns the results in rank order."""


def train_split(
    model: nn.Module, plan: Mapping[str, str], size: int, run: Run, meet: Meet = run_replicas
) -> list[Trained]:
    """Train the model over a tensor group, by default of threads; return the results in rank order."""

    def worker(collective: Collective) -> Trained:
        local = copy.deepcopy(model)
        split = split_by(local, plan, collective)
        run.before(local, collective)

        def combine() -> None:
            for name, parameter in local.named_parameters():
                if name in split.partial and parameter.grad is not None:
                    parameter.grad = parameter.grad.contiguous()
                    collective.all_reduce(parameter.grad)

        trained = _train(local, run, combine, split.pieces, lambda: collective.bytes_sent)
        trained.split = split
        return trained

    return meet(size, worker)


def split_by(model: nn.Module, plan: Mapping[str, str], collective: Collective) -> Split:
    """Apply a plan, in place."""
    split = Split(lambda: collective, collective.rank, collective.size)
    for name, style in plan.items():
        style_of(style)(model.get_submodule(children_range(name)[0]), name, split)
    return split


def check_same(
    model: nn.Module, plan: Mapping[str, str], size: int, run: Run, close: float = CLOSE
) -> tuple[Trained, list[Trained]]:
    """Train both; outputs, losses, gradients, weights and buffers must agree."""
    plain, workers = train_plain(model, run), train_split(model, plan, size, run)
    for worker in workers:
        assert torch.allclose(worker.outputs, plain.outputs, rtol=close, atol=close), "outputs"
        assert worker.losses == [
            loss if abs(loss - own) > close * max(1, abs(loss)) else own
            for loss, own in zip(plain.losses, worker.losses, strict=True)
        ], "losses"
        if plain.input_gradient is not None:
            assert worker.input_gradient is not None
            assert torch.allclose(worker.input_gradient, plain.input_gradient, rtol=close, atol=close), "input gradient"
    for what, of_plain, of_workers in (
        ("gradient", plain.gradients, [worker.gradients for worker in workers]),
        ("state", plain.state, [worker.state for worker in workers]),
    ):
        for name, expected in of_plain.items():
            for found in reassembled(
                name, expected, of_workers, [(worker.split or _NONE).pieces for worker in workers]
            ):
                assert torch.allclose(found, expected, rtol=close, atol=close), f"{what} of {name}"
    return plain, workers


def reassembled(
    name: str, plain: Tensor, held: Sequence[Mapping[str, Tensor]], pieces: Sequence[Mapping[str, TensorSlice]]
) -> list[Tensor]:
    """Return a tensor of the plain model from the pieces that count; and each worker's, where it holds the whole."""
    together, times = torch.full_like(plain, 0), torch.zeros(plain.shape)
    copies = []
    for rank, (tensors, places) in enumerate(zip(held, pieces, strict=True)):
        piece = places.get(name) or TensorSlice.whole(name, plain.shape, is_counted=rank == 0)
        if piece.is_whole and piece.is_counted:
            copies.append(tensors[name])
        if piece.is_counted and piece.numel:
            piece.put(together, tensors[name])
            one = piece.take(times)
            piece.put(times, one + 1)
        elif piece.is_whole and name not in places:
            copies.append(tensors[name])
    assert bool((times == 1).all()), f"{name}: not every element is counted once"
    return [together, *copies]


def _train(
    model: nn.Module, run: Run, combine: Callable[[], None], pieces: Mapping[str, TensorSlice], sent: Callable[[], int]
) -> Trained:
    model.train(run.train)
    draw = RngKey()
    _seed_by_name(model, draw)
    losses, bytes_sent = [], 0
    outputs, leaf = run.inputs, run.inputs
    for step in range(run.num_steps):
        model.zero_grad(set_to_none=True)
        draw.step = step
        leaf = run.inputs.detach().clone().requires_grad_(run.inputs_need_gradient)
        before = sent()
        outputs = model(leaf)
        loss = run.loss(outputs)
        loss.backward()  # type: ignore[no-untyped-call]
        bytes_sent = sent() - before
        losses.append(float(loss.detach()))
        combine()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LR / run.inputs.shape[0] * parameter.grad
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    state = {name: value.detach() for name, value in model.state_dict().items()}
    num_held = sum(parameter.numel() for parameter in model.parameters())
    return Trained(outputs.detach(), losses, leaf.grad, gradients, state, bytes_sent, num_held)


_GENERATOR = threading.Lock()
"""The threads that are workers share torch's generator: one draws at a time."""


def _seed_by_name(model: nn.Module, draw: RngKey) -> None:
    """Seed modules as the training loop does; no other thread draws from there to the end of the module's forward."""
    for _, module in model.named_modules():
        if draws(module):
            module.register_forward_pre_hook(lambda *_: _GENERATOR.acquire() and None)
    seed_modules(model, draw, torch.device("cpu"))
    for _, module in model.named_modules():
        if draws(module):
            module.register_forward_hook(lambda *_: _GENERATOR.release(), always_call=True)


_NONE = Split(lambda: (_ for _ in ()).throw(AssertionError), 0, 1)
