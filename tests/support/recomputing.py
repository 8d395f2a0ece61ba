"""Models of which parts are computed again, and their training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.trainers.core.rng import RngKey, seed_pass
from orchestray.trainers.tasks.transformer import Block, Embedding

CPU = torch.device("cpu")
DEPTH, WIDTH, SAMPLES = 64, 8, 16


def mlp(depth: int = DEPTH) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def transformer() -> nn.Module:
    return nn.Sequential(Embedding(11, 6, WIDTH, 0.2), *(Block(WIDTH, 2, 0.2) for _ in range(4)), nn.LayerNorm(WIDTH))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (2, 2, 2))]
    for _ in range(4):
        part = [nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout(0.3)]
        layers.append(nn.Sequential(*part))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))


class Residual(nn.Module):
    """A model that is not a sequence: skips, a tied weight, a parameter of its own, functions, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.layers[3].weight = self.layers[0].weight
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for index, layer in enumerate(self.layers):
            x = x + self.scale * functional.gelu(layer(x))
            if index == 2:
                x = self.dropout(self.norm(x))
        return torch.cat([x, first * x.shape[0]], dim=1)


class Drawing(nn.Module):
    """A module that draws by itself, and counts its calls."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return functional.dropout(self.linear(x) * self.gate(x).sigmoid(), 0.3, self.training) * self.count.clone()


def drawing() -> nn.Module:
    return nn.Sequential(*(Drawing() for _ in range(5)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "transformer": transformer,
    "convolutions": convolutions,
    "residual": Residual,
    "drawing": drawing,
    "encoder": encoder,
}
BOTH = pytest.mark.parametrize("how", ["blocks", "sqrt"])


def build(name: str) -> tuple[nn.Module, list[Tensor]]:
    """Return a model in double precision, and two micro-batches."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    shape = (2, SAMPLES, 6 if name == "transformer" else WIDTH)
    inputs = torch.randint(11, shape) if name == "transformer" else torch.randn(shape, dtype=torch.float64)
    return model, list(inputs)


def train(model: nn.Module, inputs: list[Tensor], draw: RngKey, *, in_turn: bool = True) -> list[Tensor]:
    """Return the losses of two micro-batches, computed one after the other or as a pipeline's stage does them."""
    losses = []
    for number, x in enumerate(inputs):
        draw.micro_batch = number
        seed_pass(draw, CPU)
        losses.append(model(x).square().mean())
        if in_turn:
            losses[-1].backward()
    if not in_turn:
        for loss in losses:
            loss.backward()
    return [loss.detach() for loss in losses]


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients and buffers."""
    found = {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert len(ours) > 2
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
