"""ADMM: training of fully connected networks by subproblems with closed forms, without a backward pass."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.solvers.base import Changes, Oracle, Solver, Taken, number

Loss = Literal["cross_entropy", "squared_error"]
_NEWTON_STEPS = 8


@dataclass(frozen=True)
class Samples:
    """A replica's samples of the whole data."""

    inputs: Tensor
    """Inputs of the first layer, float64 [samples, inputs]."""
    targets: Tensor
    """Classes [samples], or numbers [samples, outputs]."""
    rows: Tensor
    """Row of each sample in the data, [samples]."""
    loss: Loss
    """The task's loss of a sample."""


class LayeredOracle(Oracle, Protocol):
    """An `Oracle` that shows the samples behind the function."""

    def samples(self) -> Samples:
        """Return this replica's samples."""

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the replicas, which is made in its memory."""


class SampleSolver(Solver):
    """A solver that looks at the model and at the samples behind the function: it is given a `LayeredOracle`."""

    @abstractmethod
    def look_at(self, model: nn.Module, num_samples: int) -> None:
        """Look at the model before `begin`.

        Args:
            model: the model whose parameters are moved.
            num_samples: number of training samples.

        Raises:
            ConfigError: the subproblems of this model have no closed forms.
        """


@dataclass(frozen=True)
class _Layer:
    """The variables of a layer for this replica's samples, before or after an update."""

    sums: Tensor
    """Weighted sums z, [samples, outputs]."""
    outputs: Tensor
    """Activations a, [samples, outputs]; of the last layer the multipliers."""


class Admm(SampleSolver):
    """Alternating directions (G. Taylor et al., "Training Neural Networks Without Gradients: A Scalable ADMM Approach",
    ICML 2016, algorithm 1).

    The weighted sums z and the activations a of each layer are variables of their own for each sample, tied to the
    network by penalties:

        loss(z_L) + multipliers z_L + beta |z_l - W_l a_l-1|^2 + gamma |a_l - relu(z_l)|^2

    A step minimises over each of them in turn: the weights by least squares, whose matrices are summed over the
    replicas, the rest sample by sample in closed form (cross-entropy by Newton steps). Nothing is differentiated. The
    variables of all samples are state, on each replica.
    """

    def __init__(self, beta: float = 0.1, gamma: float = 1.0, warmup_steps: int = 10) -> None:
        """
        Args:
            beta: penalty on weighted sums that the weights do not give.
            gamma: penalty on activations that are not those of the weighted sums.
            warmup_steps: number of steps before the multipliers move.
        """
        super().__init__()
        self._beta, self._gamma, self._warmup = beta, gamma, warmup_steps
        self._widths: list[int] = []
        self._num_samples = 0

    def look_at(self, model: nn.Module, num_samples: int) -> None:
        layers = list(model) if isinstance(model, nn.Sequential) else []
        # No subclasses: those whose weight is computed from others, or that compute something else.
        linear = [layer for layer in layers[::2] if type(layer) is nn.Linear and layer.bias is not None]
        between = [layer for layer in layers[1::2] if isinstance(layer, nn.ReLU)]
        fits = len(linear) + len(between) == len(layers) and len(linear) == len(between) + 1
        fits = fits and type(model).forward is nn.Sequential.forward
        fits = fits and len([*model.parameters()]) == 2 * len(linear)  # else some are shared
        if not fits or not all(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "config: train.solver.type: admm solves for the weights of an nn.Sequential of nn.Linear (with bias) "
                "and nn.ReLU by turns, all of them trained, none shared or normalised; use such a model (of digits or "
                "parquet), or another solver"
            )
        self._widths = [linear[0].in_features, *(layer.out_features for layer in linear)]
        self._num_samples = num_samples

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        state = {"steps_made": number(x)}
        for index, width in enumerate(self._widths[1:]):
            state[f"sums.{index}"] = x.new_zeros(self._num_samples, width)
            state[f"outputs.{index}"] = x.new_zeros(self._num_samples, width)
        return state

    @torch.no_grad()
    def find(self, x: Tensor, oracle: Oracle, lr: float) -> Taken:
        layered = cast("LayeredOracle", oracle)
        samples, value = layered.samples(), layered.value(x)
        weights, made = self._weights(x), int(self.state["steps_made"])
        layers = self._passed(weights, samples.inputs) if made == 0 else self._known(samples.rows)
        moves = made >= self._warmup
        found, updated = self._sweep(weights, layers, samples, layered, moves_multipliers=moves)
        changes: Changes = [(self.state["steps_made"], made + 1.0)]
        for index, layer in enumerate(updated):
            for name, values in (("sums", layer.sums), ("outputs", layer.outputs)):
                whole = torch.zeros_like(self.state[f"{name}.{index}"])
                whole[samples.rows] = values
                changes.append((self.state[f"{name}.{index}"], layered.summed(whole)))
        residual = self._residual(found, updated, samples.inputs, layered)
        end = x + lr * (torch.cat([part.reshape(-1) for pair in found for part in pair]) - x)
        return Taken(end, value, changes, {"residual": residual})

    def _sweep(
        self,
        weights: Sequence[tuple[Tensor, Tensor]],
        layers: Sequence[_Layer],
        samples: Samples,
        oracle: LayeredOracle,
        *,
        moves_multipliers: bool,
    ) -> tuple[list[tuple[Tensor, Tensor]], list[_Layer]]:
        """Return weights and variables after an update of each in turn, from the first layer to the last."""
        beta, gamma = self._beta, self._gamma
        before, found, updated = samples.inputs, list[tuple[Tensor, Tensor]](), list[_Layer]()
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            weight, bias = least_squares_fit(before, layer.sums, oracle)
            found.append((weight, bias))
            given = before @ weight.T + bias
            if index == last:
                multipliers = layer.outputs
                sums = nearest_to_loss(given, multipliers, samples, beta)
                if moves_multipliers:
                    multipliers = multipliers + 2 * beta * (sums - given)
                updated.append(_Layer(sums, multipliers))
                break
            next_weight, next_bias = weights[index + 1]
            matrix = beta * next_weight.T @ next_weight
            matrix.diagonal().add_(gamma)
            right = beta * (layers[index + 1].sums - next_bias) @ next_weight + gamma * layer.sums.relu()
            outputs = torch.linalg.solve(matrix, right.T).T
            updated.append(_Layer(nearest_before_relu(outputs, given, gamma, beta), outputs))
            before = outputs
        return found, updated

    def _residual(
        self, weights: Sequence[tuple[Tensor, Tensor]], layers: Sequence[_Layer], inputs: Tensor, oracle: LayeredOracle
    ) -> float:
        """Return the root of the mean square by which variables differ from what the network gives them."""
        squares, before = inputs.new_zeros(2), inputs
        for (weight, bias), layer in zip(weights, layers, strict=True):
            differences = [layer.sums - (before @ weight.T + bias)]
            if layer is not layers[-1]:
                differences.append(layer.outputs - layer.sums.relu())
            for difference in differences:
                squares[0] += difference.square().sum()
                squares[1] += difference.numel()
            before = layer.outputs
        total = oracle.summed(squares)
        return float((total[0] / total[1]).sqrt())

    def _weights(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the weight and the bias of each layer."""
        found, start = [], 0
        for inputs, outputs in zip(self._widths, self._widths[1:], strict=False):
            middle, end = start + inputs * outputs, start + (inputs + 1) * outputs
            found.append((x[start:middle].view(outputs, inputs), x[middle:end]))
            start = end
        return found

    def _passed(self, weights: Sequence[tuple[Tensor, Tensor]], inputs: Tensor) -> list[_Layer]:
        """Return the variables that the network itself gives, with multipliers of 0."""
        found, before = list[_Layer](), inputs
        for index, (weight, bias) in enumerate(weights):
            sums = before @ weight.T + bias
            before = sums.relu() if index < len(weights) - 1 else torch.zeros_like(sums)
            found.append(_Layer(sums, before))
        return found

    def _known(self, rows: Tensor) -> list[_Layer]:
        places = range(len(self._widths) - 1)
        return [_Layer(self.state[f"sums.{index}"][rows], self.state[f"outputs.{index}"][rows]) for index in places]


def least_squares_fit(inputs: Tensor, sums: Tensor, oracle: LayeredOracle) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the least squares over the samples of all replicas; the smallest, if there are several.

    Args:
        inputs: inputs of the layer, [samples, inputs].
        sums: wanted weighted sums, [samples, outputs].
        oracle: sums over the replicas.
    """
    extended = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
    both = oracle.summed(extended.T @ torch.cat([extended, sums], dim=1))
    size = extended.shape[1]
    solution = torch.linalg.pinv(both[:, :size], hermitian=True) @ both[:, size:]
    return solution[:-1].T, solution[-1]


def nearest_before_relu(outputs: Tensor, given: Tensor, gamma: float, beta: float) -> Tensor:
    """Return the z that minimises gamma (a - relu(z))^2 + beta (z - m)^2, element by element.

    Args:
        outputs: a.
        given: m.
        gamma: penalty of the first term.
        beta: penalty of the second.
    """
    above = ((gamma * outputs + beta * given) / (gamma + beta)).clamp_min(0.0)
    below = given.clamp_max(0.0)

    def cost(z: Tensor) -> Tensor:
        return gamma * (outputs - z.relu()).square() + beta * (z - given).square()

    return torch.where(cost(above) <= cost(below), above, below)


def nearest_to_loss(given: Tensor, multipliers: Tensor, samples: Samples, beta: float) -> Tensor:
    """Return the z that minimises loss(z) + multipliers z + beta |z - m|^2 for each sample.

    Args:
        given: m, [samples, outputs].
        multipliers: the multipliers, [samples, outputs].
        samples: the samples.
        beta: penalty.
    """
    if samples.loss == "squared_error":
        return (samples.targets + beta * given - multipliers / 2) / (1.0 + beta)
    wanted = nn.functional.one_hot(samples.targets, given.shape[1]).to(given.dtype)
    z = given
    for _ in range(_NEWTON_STEPS):
        # The Hessian is diagonal plus a product of p with itself (Sherman and Morrison, 1950).
        p = z.softmax(1)
        gradient = p - wanted + multipliers + 2 * beta * (z - given)
        scaled, of_p = gradient / (p + 2 * beta), p / (p + 2 * beta)
        z = z - scaled - of_p * (p * scaled).sum(1, keepdim=True) / (1.0 - (p * of_p).sum(1, keepdim=True))
    return z


def kind_of_loss(outputs: Tensor, targets: Tensor | None, loss: float, weight: float | None) -> Loss:
    """Return which loss of `Loss` a task's is, the mean over samples.

    Args:
        outputs: outputs of the model for some samples.
        targets: the batch's `targets`.
        loss: the task's loss of them.
        weight: weight that the task gives the loss; None: the number of samples.

    Raises:
        ConfigError: it is none of them.
    """
    if targets is not None and weight is None:
        is_classes = not targets.is_floating_point()
        if is_classes and _agrees(float(nn.functional.cross_entropy(outputs, targets)), loss):
            return "cross_entropy"
        alike = not is_classes and outputs.numel() == targets.numel()
        if alike and _agrees(float((outputs.reshape(-1) - targets.reshape(-1)).square().mean()), loss):
            return "squared_error"
    raise ConfigError(
        "config: train.solver.type: admm knows the minimum of cross-entropy and of one squared error a sample next to "
        "a point, and stacking the least squares to targets; the task's loss is neither of the model's outputs "
        "and the batch's `targets`; use another solver"
    )


def _agrees(known: float, given: float) -> bool:
    return math.isclose(known, given, rel_tol=1e-5, abs_tol=1e-7)
