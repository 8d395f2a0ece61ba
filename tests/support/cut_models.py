"""Small models of many shapes to be cut into stages, and the stages run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.trainers.parallel.pipeline.stage import Stage


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.norm(self.first(x))))


class ResidualNet(nn.Module):
    """A network with blocks in a list, a long skip over all of them, and operations between the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        skip = x
        for block in self.blocks:
            x = block(x) * 0.5
        return self.head(x + skip)


class UNet(nn.Module):
    """A network of two skips, the outer over the inner, through several stages; it asks for sizes late."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.down2 = nn.Conv2d(4, 6, 3, padding=1)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up2 = nn.Conv2d(12, 4, 3, padding=1)
        self.up1 = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        first = functional.relu(self.norm1(self.down1(x)))
        second = functional.relu(self.down2(functional.max_pool2d(first, 2)))
        x = self.middle(functional.max_pool2d(second, 2))
        x = functional.interpolate(x, size=second.shape[-2:])
        x = self.up2(torch.cat([x, second], dim=1))
        x = functional.interpolate(x, size=(height, width))
        return self.up1(torch.cat([x, first], 1)).flatten(1)


class Tied(nn.Module):
    """A language model whose embedding is its last layer too, under a second name; with tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.start = nn.Parameter(torch.randn(1, 1, 8))
        self.register_buffer("scale", torch.tensor(0.5))
        self.attention = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        samples, time = tokens.shape
        assert time <= 16, "too long"
        x = self.embedding(tokens) + torch.arange(time, device=tokens.device).view(1, -1, 1) * self.scale
        x = torch.cat([self.start.expand(samples, -1, -1), x], 1)
        hidden = torch.ones((time + 1, time + 1), dtype=torch.bool).triu(1)
        for attention in self.attention:
            attended, _ = attention(x, x, x, attn_mask=hidden, need_weights=False)
            x = x + functional.dropout(attended, 0.2, self.training)
        x = self.norm(x).view(samples, time + 1, 8)
        return self.head(x[:, 1:])


class Recurrent(nn.Module):
    """A module that returns a tuple, of which parts are needed at once and later; a dict at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        embedded = self.embedding(tokens)
        output, (state, _) = self.lstm(embedded)
        x = self.first(output).sum(1)
        with torch.no_grad():
            scale = self.second(state[-1]).mean() + x.mean()
        return {"logits": self.second(x + state[-1]) * scale, "parts": (x, [scale, tokens.shape[0]]), "nothing": None}


class Encoder(nn.Module):
    """torch's own stack of transformer layers, with a causal mask made in `forward`, or none."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.embedding = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(8), enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)
        self.is_causal = is_causal

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]) if self.is_causal else None
        return self.head(self.encoder(self.embedding(tokens), mask=mask))


class Shared(nn.Module):
    """A network whose layer is called three times."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) if norm else nn.Linear(6, 6)
        self.own = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.shared(x))
        x = torch.tanh(self.shared(x))
        y = self.own(x)
        return self.shared(y), y


def vectors(samples: int = 5) -> Tensor:
    return torch.randn(samples, 6, dtype=torch.float64)


def images(samples: int = 5) -> Tensor:
    return torch.randn(samples, 1, 8, 8, dtype=torch.float64)


def tokens(samples: int = 5) -> Tensor:
    return torch.randint(0, 11, (samples, 4))


def perceptron() -> nn.Module:
    layers = [nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    return nn.Sequential(first, nn.MaxPool2d(2), nn.Flatten(), nn.Sequential(nn.Linear(36, 5), nn.BatchNorm1d(5)))


def frozen() -> nn.Module:
    model = ResidualNet()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.1.second", "head.0")))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "perceptron": (perceptron, vectors),
    "convolutions": (convolutions, images),
    "residual": (ResidualNet, vectors),
    "frozen": (frozen, vectors),
    "u_net": (UNet, images),
    "tied_attention": (Tied, tokens),
    "recurrent": (Recurrent, tokens),
    "shared": (Shared, vectors),
    "encoder": (lambda: Encoder(is_causal=False), tokens),
    "causal_encoder": (lambda: Encoder(is_causal=True), tokens),
    "transformer": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.1), nn.Linear(8, 2)),
        vectors,
    ),
}
"""By name, what builds the model, and its inputs for a number of samples."""


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name][0]().double()


def leaves_of(outputs: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(outputs)


def loss_of(outputs: Any) -> Tensor:
    """Return a loss with different weights for all that the gradient can reach."""
    found = [leaf for leaf in leaves_of(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([((leaf * (1 + index)) ** 2).mean() for index, leaf in enumerate(found)]).sum()


def run_chain(stages: Sequence[Stage], inputs: Tensor) -> Any:
    """Run one micro-batch forward and backward as separate workers do.

    The values that pass from stage to stage are copied, and are leaves again.
    """
    values: tuple[Any, ...] = (inputs,)
    passed: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
    for stage in stages:
        given = stage(*values)
        passed.append((values, given))
        if stage is not stages[-1]:
            assert all(isinstance(value, Tensor) for value in given)
            values = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in given)
    outputs = passed[-1][1][0]
    if not torch.is_grad_enabled():
        return outputs
    ends: Iterable[tuple[Tensor, Any]] = [(loss_of(outputs), None)]
    for index in reversed(range(len(stages))):
        torch.autograd.backward(*zip(*[(value, start) for value, start in ends if value.requires_grad], strict=True))
        if index:
            ends = [
                (value, taken.grad)
                for value, taken in zip(passed[index - 1][1], passed[index][0], strict=True)
                if taken.grad is not None
            ]
        if not any(value.requires_grad for value, _ in ends):
            break
    return outputs


def run_plain(model: nn.Module, inputs: Tensor) -> Any:
    outputs = model(inputs)
    if torch.is_grad_enabled():
        loss_of(outputs).backward()
    return outputs
