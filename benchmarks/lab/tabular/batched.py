"""Many cells of the small space trained as one program: what made the table.

The models of a batch lie side by side along the channels. Each operation is applied, as one grouped convolution or
pooling, to those models that have it at a place; the losses are summed, so that each model's gradient is its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.search.spaces.architectures.cell import NUM_INPUTS

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.cell import CellNodes

KERNELS = {"conv_1x1": 1, "conv_3x3": 3}
"""Operations that have weights, with the width of their kernels."""


class GroupedNorm(nn.Module):
    """Batch normalisation of many models: it is one over the channels of all."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(num_channels)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.norm(inputs)
        return result


class Side(nn.Module):
    """One side of a node in all models: an operation on a value before.

    Args:
        sources: of each model, which value.
        operations: of each model, by name.
        seeds: of each model.
        channels: of a value of one model.
        place: a number of the place in the cell; models of one seed start alike at one place.
    """

    gather: Tensor
    back: Tensor

    def __init__(
        self, sources: Sequence[int], operations: Sequence[str], seeds: Sequence[int], channels: int, place: int
    ) -> None:
        super().__init__()
        num_models = len(sources)
        order = sorted(range(num_models), key=lambda model: operations[model])
        within = torch.arange(channels)
        gather = [(sources[model] * num_models + model) * channels + within for model in order]
        back = torch.empty(num_models, dtype=torch.long)
        back[torch.tensor(order)] = torch.arange(num_models)
        self.register_buffer("gather", torch.cat(gather), persistent=False)
        self.register_buffer("back", (back[:, None] * channels + within).flatten(), persistent=False)
        self.names = sorted(set(operations))
        self.counts = [operations.count(name) * channels for name in self.names]
        self.channels = channels
        self.weights = nn.ParameterDict()
        self.norms = nn.ModuleDict()
        for name in self.names:
            if name in KERNELS:
                having = [seeds[model] for model in order if operations[model] == name]
                fan = (channels, channels, KERNELS[name], KERNELS[name])
                drawn = {seed: drawn_weight(fan, seed, place, KERNELS[name]) for seed in set(having)}
                self.weights[name] = nn.Parameter(torch.cat([drawn[seed] for seed in having]))
                self.norms[name] = GroupedNorm(len(having) * channels)

    def forward(self, values: Tensor) -> Tensor:
        chosen = values.index_select(1, self.gather)
        chunks = torch.split(chosen, self.counts, dim=1)
        done = [self._operate(name, chunk) for name, chunk in zip(self.names, chunks, strict=True)]
        return torch.cat(done, dim=1).index_select(1, self.back)

    def _operate(self, name: str, inputs: Tensor) -> Tensor:
        if name == "identity":
            return inputs
        if name == "max_3x3":
            return functional.max_pool2d(inputs, 3, 1, 1)
        if name == "average_3x3":
            return functional.avg_pool2d(inputs, 3, 1, 1, count_include_pad=False)
        groups = inputs.shape[1] // self.channels
        result: Tensor = self.norms[name](
            functional.conv2d(inputs, self.weights[name], padding=KERNELS[name] // 2, groups=groups)
        )
        return result.relu()


class BatchedCells(nn.Module):
    """The networks of space `cell` with one normal cell and no reduction, for several cells and seeds at once.

    Model `cell * num_seeds + seed` is a cell's with one seed's first weights.

    Args:
        cells: the nodes of each cell; all have as many.
        num_seeds: networks of each cell.
        channels: of a value.
        num_outputs: classes.
    """

    loose: Tensor

    def __init__(self, cells: Sequence[CellNodes], num_seeds: int, channels: int, num_outputs: int) -> None:
        super().__init__()
        models = list(product(cells, range(num_seeds)))
        seeds = [seed for _, seed in models]
        self.num_models, self.channels, self.num_nodes = len(models), channels, len(cells[0])

        def stacked(shape: tuple[int, ...], place: int) -> nn.Parameter:
            drawn = [drawn_weight(shape, seed, place, 0) for seed in range(num_seeds)]
            return nn.Parameter(torch.cat([drawn[seed] for seed in seeds]))

        self.stem = stacked((channels, 1, 3, 3), 1)
        self.fits = nn.ParameterList([stacked((channels, channels, 1, 1), 2 + index) for index in range(NUM_INPUTS)])
        self.norms = nn.ModuleList([GroupedNorm(self.num_models * channels) for _ in range(1 + NUM_INPUTS)])
        self.sides = nn.ModuleList(
            nn.ModuleList(
                Side(
                    [cell[node].sources[side] for cell, _ in models],
                    [cell[node].operations[side] for cell, _ in models],
                    seeds,
                    channels,
                    place=10 + 2 * node + side,
                )
                for side in range(2)
            )
            for node in range(self.num_nodes)
        )
        loose = torch.tensor([_loose(cell) for cell, _ in models])
        self.register_buffer("loose", loose[:, :, None].expand(-1, -1, channels).flatten(1).float(), persistent=False)
        scale = self.loose.sum(1).rsqrt()[:, None, None]
        draws = [_uniform((self.num_nodes * channels + 1, num_outputs), seed, 4, 0) for seed in range(num_seeds)]
        self.head = nn.Parameter(torch.stack([draws[seed] for seed in seeds]) * scale)
        """[models, features and bias, classes]"""

    def forward(self, images: Tensor) -> Tensor:
        """Return outputs [models, batch, classes] for images [batch, 1, height, width]."""
        stem = self.norms[0](functional.conv2d(images, self.stem, padding=1)).relu()
        values = [
            norm(functional.conv2d(stem, weight, groups=self.num_models))
            for norm, weight in zip(list(self.norms)[1:], self.fits, strict=True)
        ]
        for node in range(self.num_nodes):
            before = torch.cat(values, dim=1)
            values.append(sum((side(before) for side in cast(nn.ModuleList, self.sides[node])), torch.zeros(())))
        pooled = [value.mean(dim=(2, 3)).reshape(-1, self.num_models, self.channels) for value in values[NUM_INPUTS:]]
        features = torch.cat(pooled, dim=2).transpose(0, 1) * self.loose[:, None]
        outputs: Tensor = torch.baddbmm(self.head[:, -1:], features, self.head[:, :-1])
        return outputs


def _loose(cell: CellNodes) -> list[bool]:
    """Return, for each node, True if no other uses it: it is a part of the cell's result."""
    used = {source for node in cell for source in node.sources}
    return [node + NUM_INPUTS not in used for node in range(len(cell))]


def drawn_weight(shape: tuple[int, ...], seed: int, place: int, kind: int) -> Tensor:
    """Draw the first values of a convolution, evenly within 1 / sqrt(inputs of an output), as torch's own are."""
    fan_in = shape[1] * shape[2] * shape[3]
    scaled: Tensor = _uniform(shape, seed, place, kind) / fan_in**0.5
    return scaled


def _uniform(shape: tuple[int, ...], seed: int, place: int, kind: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + seed * 10_000 + place * 100 + kind)
    drawn: Tensor = torch.rand(shape, generator=generator) * 2 - 1
    return drawn


def train(
    model: BatchedCells, images: Tensor, labels: Tensor, *, epochs: int, batch_size: int, lr: float, seed: int = 0
) -> None:
    """Train every model of the batch by SGD with momentum 0.9 and a cosine schedule, all on the same batches.

    Args:
        model: what is trained.
        images: [samples, 1, height, width].
        labels: [samples].
        epochs: passes over the samples.
        batch_size: samples a step; a short last batch is left out.
        lr: the first learning rate.
        seed: of the order of the samples.
    """
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    per_epoch = len(labels) // batch_size
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator)[: per_epoch * batch_size].view(per_epoch, -1)
        for rows in order:
            outputs = model(images[rows])
            wanted = labels[rows].repeat(model.num_models)
            loss = functional.cross_entropy(outputs.flatten(0, 1), wanted, reduction="sum") / batch_size
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()


@torch.no_grad()
def evaluate(model: BatchedCells, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return accuracy and mean cross-entropy of each model, shape [models] each.

    Of a model that has diverged the cross-entropy is that of guessing, so that it has one.
    """
    model.eval()
    outputs = model(images)
    wanted = labels.repeat(model.num_models)
    losses = functional.cross_entropy(outputs.flatten(0, 1), wanted, reduction="none").view(model.num_models, -1)
    guessing = math.log(outputs.shape[2])
    return (outputs.argmax(2) == labels).float().mean(1), losses.mean(1).nan_to_num(guessing, guessing)
