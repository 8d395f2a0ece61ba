"""Deep stacking networks: modules trained one after the other, output weights by least squares."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.solvers.admm import LayeredOracle, Samples, SampleSolver, least_squares_fit
from orchestray.trainers.solvers.base import Oracle, Taken, number


class Stack(Protocol):
    """A model of modules, each with hidden units and outputs of its own.

    Module k has the hidden units h_k = sigmoid(W_k x + V_k [y_1 .. y_(k-1)] + b_k) and the outputs y_k = U_k h_k + c_k;
    the model's outputs are those of the last one.
    """

    raw: nn.Linear
    """W and b of all modules, one below the other."""
    previous: nn.ModuleList
    """V of each module but the first, without a bias."""
    upper: nn.ModuleList
    """U and c of each module."""


class Stacking(SampleSolver):
    """Training of deep stacking networks, module by module (Deng and Yu, "Deep Convex Net: A Scalable Architecture for
    Speech Pattern Classification", Interspeech 2011, sections 2 and 3).

    The output weights of a module are the least squares of its hidden units to the targets, 0 and 1 for classes. The
    matrices of these are summed over the replicas. Its lower weights move by the gradient of the error that is left. As
    the output weights are at their minimum, they count as constants in it. Modules below are finished and stay as they
    are, and nothing is propagated back through them.
    """

    def __init__(self, steps_per_module: int = 20) -> None:
        """
        Args:
            steps_per_module: number of steps before the next module is trained; the last one goes on to the end.
        """
        super().__init__()
        self._steps_per_module = steps_per_module
        self._stack: Stack | None = None
        self._names: list[str] = []

    def look_at(self, model: nn.Module, num_samples: int) -> None:
        upper, previous, raw = (getattr(model, name, None) for name in ("upper", "previous", "raw"))
        fits = isinstance(upper, nn.ModuleList) and isinstance(previous, nn.ModuleList) and isinstance(raw, nn.Linear)
        if not fits or not all(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "config: train.solver.type: stacking trains a deep stacking network, a model with the layers `raw`, "
                "`previous` and `upper` of its modules, all of them trained; use such a task as "
                "orchestray.trainers.tasks.digits_networks:DeepStackingDigits, or another solver"
            )
        self._stack = cast("Stack", model)
        self._names = [name for name, _ in model.named_parameters()]

    def fresh(self, x: Tensor) -> dict[str, Tensor]:
        return {"steps_made": number(x)}

    @torch.no_grad()
    def find(self, x: Tensor, oracle: Oracle, lr: float) -> Taken:
        layered = cast("LayeredOracle", oracle)
        samples, value = layered.samples(), layered.value(x)
        wanted, made = _targets(samples, self.num_outputs), int(self.state["steps_made"])
        module = min(made // self._steps_per_module, self.num_modules - 1)
        end = x.clone()
        parts = self._parts(end)
        seen = self._outputs_below(parts, module, samples.inputs)
        lower = self._lower(parts, module)

        hidden = _hidden(lower, samples.inputs, seen)
        weight, bias = least_squares_fit(hidden, wanted, layered)
        slopes = 2.0 * ((hidden @ weight.T + bias - wanted) @ weight) * hidden * (1.0 - hidden)
        gradients = [slopes.T @ samples.inputs, slopes.sum(0), slopes.T @ seen]
        sums = layered.summed(torch.cat([*(each.reshape(-1) for each in gradients), x.new_tensor([len(wanted)])]))
        for part, moved in zip(lower, torch.split(sums[:-1], [each.numel() for each in lower]), strict=True):
            part -= lr * (moved / sums[-1]).view_as(part)

        hidden = _hidden(lower, samples.inputs, seen)
        weight, bias = least_squares_fit(hidden, wanted, layered)
        parts[f"upper.{module}.weight"].copy_(weight)
        parts[f"upper.{module}.bias"].copy_(bias)
        error = layered.summed((hidden @ weight.T + bias - wanted).square().sum()[None]) / sums[-1]
        metrics = {"module": float(module + 1), "squared_error": float(error)}
        return Taken(end, value, [(self.state["steps_made"], made + 1.0)], metrics)

    @property
    def num_modules(self) -> int:
        """Number of modules of the model."""
        assert self._stack is not None
        return len(self._stack.upper)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of each module."""
        assert self._stack is not None
        return cast("nn.Linear", self._stack.upper[0]).out_features

    def _parts(self, x: Tensor) -> dict[str, Tensor]:
        """Return views of the parameters in a vector, by name."""
        named = dict(cast("nn.Module", self._stack).named_parameters())
        cut = torch.split(x, [named[name].numel() for name in self._names])
        return {name: part.view_as(named[name]) for name, part in zip(self._names, cut, strict=True)}

    def _lower(self, parts: dict[str, Tensor], module: int) -> list[Tensor]:
        """Return W, b and V of a module; V is empty in the first."""
        weights, biases = (parts[name].chunk(self.num_modules)[module] for name in ("raw.weight", "raw.bias"))
        empty = weights.new_zeros(len(weights), 0)
        return [weights, biases, parts[f"previous.{module - 1}.weight"] if module else empty]

    def _outputs_below(self, parts: dict[str, Tensor], module: int, inputs: Tensor) -> Tensor:
        """Return the outputs of the modules below one, side by side, [samples, modules x outputs]."""
        seen = inputs.new_zeros(len(inputs), 0)
        for below in range(module):
            hidden = _hidden(self._lower(parts, below), inputs, seen)
            outputs = hidden @ parts[f"upper.{below}.weight"].T + parts[f"upper.{below}.bias"]
            seen = torch.cat([seen, outputs], 1)
        return seen


def _hidden(lower: list[Tensor], inputs: Tensor, seen: Tensor) -> Tensor:
    of_inputs, bias, of_seen = lower
    return torch.sigmoid(inputs @ of_inputs.T + seen @ of_seen.T + bias)


def _targets(samples: Samples, num_outputs: int) -> Tensor:
    """Return what the outputs should be, [samples, outputs]: 1 for the class of a sample, or its numbers."""
    if samples.loss == "squared_error":
        return samples.targets
    return nn.functional.one_hot(samples.targets, num_outputs).to(samples.inputs.dtype)
