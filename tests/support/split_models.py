"""A model split over threads against the plain one: outputs, loss, every gradient, and the weights after updates."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.core.rng import RngKey, draws, seed_modules
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.base import Split
from support.threads import run_replicas

TOLERANCE = 1e-12
NUM_STEPS = 2
_LR = 0.1
_drawing = threading.Lock()
"""Torch's generator is one for all threads: seeding and drawing are not to be torn apart."""


@dataclass
class Trained:
    """Results of a few steps of plain gradient descent with momentum."""

    outputs: list[Tensor]
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    bytes_forward: int = 0
    """Sent by this worker in the last step."""
    bytes_backward: int = 0


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model with the same weights each time; none is zero, so that nothing is right by accident."""
    with _drawing:
        torch.manual_seed(seed)
        model = make().double()
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1).abs_() if tensor.dim() == 1 else tensor.add_(
                    torch.randn_like(tensor) * 0.01
                )
    return model


def train(model: nn.Module, inputs: Any, split: Split | None = None, group: Collective | None = None) -> Trained:
    """Train for `NUM_STEPS` steps; the loss weighs every output differently."""
    draw = RngKey(seed=5)
    handles = seed_modules(model, draw, torch.device("cpu"))
    handles += _serialise(model)
    momenta: dict[str, Tensor] = {}
    trained = Trained([], [], [], {})
    for step in range(NUM_STEPS):
        draw.step = step
        model.zero_grad()
        begun = 0 if group is None else group.bytes_sent
        output = model(inputs)
        middle = 0 if group is None else group.bytes_sent
        weighing = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view(output.shape)
        loss = (output * weighing).sum() + (output**2).mean()
        loss.backward()
        ended = 0 if group is None else group.bytes_sent
        trained.bytes_forward, trained.bytes_backward = middle - begun, ended - middle
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if split is not None and group is not None:
            for name in sorted(split.partial & set(gradients)):
                group.all_reduce(gradients[name])
        trained.outputs.append(output.detach())
        trained.losses.append(float(loss.detach()))
        trained.gradients.append(gradients)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in gradients:
                    momenta[name] = 0.9 * momenta.get(name, torch.zeros(())) + gradients[name]
                    parameter -= _LR * momenta[name] / 10
    trained.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for handle in handles:
        handle.remove()
    return trained


def check_split(
    make: Callable[[], nn.Module],
    plan: Mapping[str, str],
    inputs: Any,
    size: int,
    *,
    tolerance: float = TOLERANCE,
    is_checked: bool = True,
) -> list[tuple[Split, Trained]]:
    """Assert that the split model computes what the plain one does; return what each worker has."""
    plain_model = build(make)
    models = [copy.deepcopy(plain_model) for _ in range(size)]
    names = list(plain_model.state_dict())
    plain = train(plain_model, inputs)

    def run(group: Collective) -> tuple[Split, Trained]:
        torch.set_num_threads(1)
        model = models[group.rank]
        example = inputs if is_checked else None
        split = split_model(model, plan, lambda: group, group.rank, group.size, example=example)
        model.train()
        assert list(model.state_dict()) == names
        return split, train(model, inputs, split, group)

    workers = run_replicas(size, run)
    assert all(split.pieces for split, _ in workers)
    for _, trained in workers:
        assert len(trained.outputs) == NUM_STEPS
        for ours, theirs in zip(trained.outputs, plain.outputs, strict=True):
            assert_close(ours, theirs, tolerance, "output")
        assert all(abs(a - b) <= tolerance * max(1, abs(b)) for a, b in zip(trained.losses, plain.losses, strict=True))
    for step in range(NUM_STEPS):
        gradients = [trained.gradients[step] for _, trained in workers]
        check_joined([split for split, _ in workers], gradients, plain.gradients[step], tolerance)
    check_joined([split for split, _ in workers], [trained.weights for _, trained in workers], plain.weights, tolerance)
    return workers


def check_joined(
    splits: list[Split], held: list[dict[str, Tensor]], plain: Mapping[str, Tensor], tolerance: float
) -> None:
    """Assert that the workers' parts, each in its place, are the plain tensors.

    Tensors that all workers hold whole must have the same bits on each.
    """
    for mine in held:
        assert set(mine) == set(plain)
    for name, whole in plain.items():
        joined = torch.full_like(whole, float("nan")) if whole.is_floating_point() else torch.zeros_like(whole)
        for split, mine in zip(splits, held, strict=True):
            piece = split.pieces.get(name) or TensorSlice.whole(name, whole.shape)
            assert mine[name].shape == piece.local_shape, name
            piece.put(joined, mine[name])
            if name not in split.pieces:
                assert torch.equal(mine[name], held[0][name]), f"{name} is not the same on every worker"
        assert_close(joined, whole, tolerance, name)


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    assert ours.shape == theirs.shape, f"{what}: {list(ours.shape)} for {list(theirs.shape)}"
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), what
        return
    apart = float((ours - theirs).detach().abs().max()) if theirs.numel() else 0.0
    size = max(1.0, float(theirs.detach().abs().max())) if theirs.numel() else 1.0
    assert apart <= tolerance * size, f"{what} is {apart:.3g} apart"


def _serialise(model: nn.Module) -> list[Any]:
    """Let no other thread draw between the seeding of a module and the end of its draws."""
    handles = []
    for module in model.modules():
        if draws(module) and not isinstance(module, nn.MultiheadAttention):
            handles.append(module.register_forward_pre_hook(lambda _m, _i: _lock(), prepend=True))
            handles.append(module.register_forward_hook(lambda _m, _i, _o: _drawing.release()))
    return handles


def _lock() -> None:
    _drawing.acquire()
