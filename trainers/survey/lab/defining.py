"""Operators written down by their definitions, against torch's on random shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.operators import cells, feed_forward
from orchestray.trainers.survey.operators.reductions import chain, tree
from orchestray.trainers.tasks.digits import Digits
from orchestray.trainers.tasks.parquet import ParquetTable

CELLS: dict[str, tuple[cells.Cell, type[nn.RNNBase], int]] = {
    "Elman": (cells.elman, nn.RNN, 1),
    "LSTM": (cells.lstm, nn.LSTM, 2),
    "GRU": (cells.gru, nn.GRU, 1),
}
"""Cells, the layer of torch that has them, and the number of tensors in their state."""
Pair = tuple[Tensor, Tensor, str]
"""Outputs by definition, outputs of torch, and the shapes of the inputs."""
Losses = tuple[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor]]
"""A loss and its gradient by formula, the loss of torch, and the loss and the gradient of a task."""


def feed_forward_operators(rounds: int = 3) -> Exhibit:
    """Compute each operator by its definition and by torch, on random shapes.

    Args:
        rounds: shapes of each operator.
    """
    generator = torch.Generator().manual_seed(0)
    rows: list[list[Any]] = []
    for name, compare in OPERATORS.items():
        for _ in range(rounds):
            ours, torchs, shapes = compare(generator)
            rows.append([name, shapes, " x ".join(map(str, ours.shape)), float((ours - torchs).abs().max())])
    apart = max(row[-1] for row in rows)
    columns = ["operator", "inputs", "outputs", "largest difference"]
    findings = [f"Each is torch's on {rounds} random shapes, to {apart:.1g}."]
    return Exhibit("feed-forward", "Operators by their definitions", columns, rows, findings)


def reductions(rounds: int = 0, counts: Sequence[int] = (2, 7, 16, 100, 1000)) -> Exhibit:
    """Add whole numbers in a chain and in a tree, and count the additions and the longest chain of them.

    Args:
        rounds: unused: nothing is timed.
        counts: numbers of values.
    """
    del rounds
    rows: list[list[Any]] = []
    for count in counts:
        values = torch.randint(-(2**40), 2**40, (count,), generator=torch.Generator().manual_seed(count)).unbind()
        exact = sum(int(value) for value in values)
        for name, reduce in (("chain", chain), ("tree", tree)):
            graph = traced(partial(reduce, values, torch.add))
            apart = int(reduce(values, torch.add)) - exact
            rows.append([name, count, graph.work, graph.depth, graph.parallelism, apart])
    linear, of_tree = rows[-2:]
    additions = f"{linear[2]:,} additions in a chain and {of_tree[2]:,} in a tree"
    findings = [
        f"{counts[-1]:,} values take {additions}; the longest path has {linear[3]:,} and {of_tree[3]:,} of them.",
        "All sums are exact." if not any(row[-1] for row in rows) else "Some sums are not exact.",
    ]
    columns = ["way", "values", "additions", "depth", "additions side by side", "difference"]
    return Exhibit("reductions", "Sums in a chain and in a tree", columns, rows, findings)


def recurrent_cells(rounds: int = 1, steps: int = 6, features: int = 5, hidden: int = 8) -> Exhibit:
    """Compute each recurrent cell by its equations and by torch: outputs, and gradients of the weights."""
    del rounds
    rows: list[list[Any]] = []
    for name, (cell, layer, num_states) in CELLS.items():
        torch.manual_seed(0)
        network = layer(features, hidden).double()  # type: ignore[call-arg,arg-type]
        x = torch.randn(steps, 3, features, dtype=torch.float64)
        weights = list(network.parameters())
        exact = network(x)[0]
        of_torch = torch.autograd.grad(exact.square().sum(), weights)
        state = (x.new_zeros(3, hidden),) * num_states
        found, _ = cells.unrolled(cell, cells.CellWeights.of_layer(network), x, state)
        by_hand = torch.autograd.grad(found.square().sum(), weights)
        apart = max(float((one - two).abs().max()) for one, two in zip(by_hand, of_torch, strict=True))
        count = sum(each.numel() for each in weights)
        rows.append([name, len(weights[0]) // hidden, count, float((found - exact).detach().abs().max()), apart])
    lstm = next(row[2] for row in rows if row[0] == "LSTM")
    rows = [[*row[:3], row[2] / lstm, *row[3:]] for row in rows]
    parts = {row[0]: row[3] for row in rows}
    findings = [
        f"A GRU has {parts['GRU']:.4g} of the parameters of an LSTM, Elman's cell {parts['Elman']:.4g}.",
        f"Outputs and gradients are torch's, to {max(max(row[-2:]) for row in rows):.1g}.",
    ]
    columns = ["cell", "gates", "parameters", "part of an LSTM's", "difference of outputs", "of gradients"]
    return Exhibit("cells", "Recurrent cells by their equations", columns, rows, findings)


def losses(rounds: int = 3) -> Exhibit:
    """Compute the loss of classification and that of regression by formula, by torch, and by the tasks.

    Args:
        rounds: shapes of each loss.
    """
    generator = torch.Generator().manual_seed(0)
    rows: list[list[Any]] = []
    for name, compare in LOSSES.items():
        rows += [[name, *_loss_row(*compare(generator))] for _ in range(rounds)]
    apart = {name: [max(row[place] for row in rows if row[0] == name) for place in (2, 3, 4)] for name in LOSSES}
    columns = ["loss", "outputs", "difference from torch's", "from the task's", "of the gradient from the task's"]
    findings = [
        f"The {name} of tasks is torch's and its formula, to {max(of_torch, of_task):.1g}; "
        f"its gradient is {GRADIENTS[name]}, to {of_gradient:.1g}."
        for name, (of_torch, of_task, of_gradient) in apart.items()
    ]
    return Exhibit("losses", "Losses by their formulas", columns, rows, findings)


def _loss_row(by_formula: tuple[Tensor, Tensor], torchs: Tensor, tasks: tuple[Tensor, Tensor]) -> list[Any]:
    (loss, gradient), (of_task, gradient_of_task) = by_formula, tasks
    apart = [float((loss - other).abs()) for other in (torchs, of_task)]
    return [_shown(gradient), *apart, float((gradient - gradient_of_task).abs().max())]


def _size(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (1,), generator=generator))


def _values(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _convolution(generator: torch.Generator) -> Pair:
    size = partial(_size, generator)
    channels, kernel = size(1, 3), (size(1, 4), size(1, 4))
    x = _values(generator, size(1, 3), channels, kernel[0] + size(0, 5), kernel[1] + size(0, 5))
    weight = _values(generator, size(1, 4), channels, *kernel)
    return feed_forward.convolution(x, weight), functional.conv2d(x, weight), f"{_shown(x)}, {_shown(weight)}"


def _pooling(is_largest: bool, generator: torch.Generator) -> Pair:
    size = partial(_size, generator)
    window, stride = size(1, 3), size(1, 3)
    x = _values(generator, size(1, 3), size(1, 3), window + size(0, 6), window + size(0, 6))
    pool, of_torch = (max, functional.max_pool2d) if is_largest else (feed_forward.mean, functional.avg_pool2d)
    shapes = f"{_shown(x)}, window {window}, stride {stride}"
    return feed_forward.pooling(x, window, stride, pool), of_torch(x, window, stride), shapes


def _activation(ours: Callable[[float], float], torchs: Callable[[Tensor], Tensor], generator: torch.Generator) -> Pair:
    x = 3 * _values(generator, _size(generator, 1, 4), _size(generator, 1, 9))
    return feed_forward.each_value(x, ours), torchs(x), _shown(x)


def _softmax(generator: torch.Generator) -> Pair:
    x = 20 * _values(generator, _size(generator, 1, 4), _size(generator, 1, 9))
    return feed_forward.softmax(x), torch.softmax(x, dim=1), _shown(x)


def _cross_entropy(generator: torch.Generator) -> Losses:
    x = 3 * _values(generator, _size(generator, 1, 6), _size(generator, 2, 9))
    targets = torch.randint(x.shape[1], (len(x),), generator=generator)
    task = _with_gradient(Digits().loss, x, targets)
    return feed_forward.cross_entropy(x, targets), functional.cross_entropy(x, targets), task


def _squared_error(generator: torch.Generator) -> Losses:
    x = 3 * _values(generator, _size(generator, 1, 6), 1)
    targets = _values(generator, len(x))
    task = _with_gradient(ParquetTable("rows.parquet", "label", kind="regression").loss, x, targets)
    return feed_forward.squared_error(x, targets), functional.mse_loss(x[:, 0], targets), task


def _with_gradient(loss_of: Callable[..., Tensor], x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return a task's loss, and its gradient with respect to the outputs."""
    outputs = x.clone().requires_grad_()
    loss = loss_of(outputs, {"targets": targets})
    return loss.detach(), torch.autograd.grad(loss, outputs)[0]


def _shown(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


OPERATORS: dict[str, Callable[[torch.Generator], Pair]] = {
    "convolution": _convolution,
    "max pooling": partial(_pooling, True),
    "average pooling": partial(_pooling, False),
    "sigmoid": partial(_activation, feed_forward.sigmoid, torch.sigmoid),
    "tanh": partial(_activation, feed_forward.tanh, torch.tanh),
    "ReLU": partial(_activation, feed_forward.relu, torch.relu),
    "softmax": _softmax,
}
LOSSES: dict[str, Callable[[torch.Generator], Losses]] = {
    "softmax cross-entropy": _cross_entropy,
    "squared loss": _squared_error,
}
GRADIENTS = {
    "softmax cross-entropy": "softmax less target over the samples",
    "squared loss": "twice the error over the samples",
}
