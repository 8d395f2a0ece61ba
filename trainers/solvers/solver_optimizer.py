"""A solver as the optimizer of a run, so that its state is kept, handed on and resumed as an optimizer's is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.solvers.admm import SampleSolver
from orchestray.trainers.solvers.base import Solver
from orchestray.trainers.solvers.registry import SOLVERS

MOST_DENSE = 10_000
"""Largest number of parameters of which a solver may hold a number for each pair: 800 MB."""
_PREFIX = "solver."


class SolverOptimizer(Optimizer):
    """The solver of a run, whose state has the names `solver.<name>`. The loop asks the solver itself for steps."""

    takes_parts = False
    mixes_parameters = True

    def __init__(
        self,
        model: nn.Module,
        num_samples: Callable[[], int],
        type: str,  # noqa: A002 - the config's key
        *,
        lr: float,
        weight_decay: float,
        **arguments: Any,
    ) -> None:
        """
        Args:
            model: the plain model.
            num_samples: returns the number of training samples.
            type: name of the solver.
            lr: its learning rate, which each step is given.
            weight_decay: factor of the penalty that the function gets.
            arguments: the other keys of `train.solver`.

        Raises:
            ConfigError: the solver cannot train this model.
        """
        super().__init__()
        self.solver: Solver = SOLVERS.find(type)(**arguments)
        self.weight_decay = weight_decay
        self.section = SOLVERS.params(type)
        self.kind = type
        if isinstance(self.solver, SampleSolver):
            self.solver.look_at(model, num_samples())

    def init(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named_params)
        super().init(named)
        if not named:
            raise ConfigError("config: train.solver: the model has no parameter that is trained")
        if strange := next((name for name, parameter in named if not parameter.is_floating_point()), None):
            raise ConfigError(
                f"config: train.solver.type: the parameter {strange!r} is not of real numbers, for which "
                f"{self.kind} is not defined; use train.optimizer"
            )
        size = sum(parameter.numel() for _, parameter in named)
        if self.section.is_dense and size > MOST_DENSE:
            raise ConfigError(
                f"config: train.solver.type: {self.kind} holds a number for each pair of parameters, and the model "
                f"has {size:,}: {8 * size**2 / 1e9:,.0f} GB; at most {MOST_DENSE:,} are taken. Use lbfgs or "
                "hessian_free."
            )
        self.solver.begin(torch.zeros(size, dtype=torch.float64, device=named[0][1].device))

    def state_tensors(self) -> dict[str, Tensor]:
        return {_PREFIX + name: tensor for name, tensor in self.solver.state.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        own = self.state_tensors()
        if wrong := next((n for n in {**own, **tensors} if n not in own or n not in tensors), None) or next(
            (n for n in own if own[n].shape != tensors[n].shape), None
        ):
            raise CheckpointError(
                f"The saved state of the solver does not fit {self.kind} and this model: {wrong!r} differs. Go on "
                "with the solver and the model it was saved with."
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        raise NotImplementedError("A solver's step needs more than the gradients; see `Solver.find`.")

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        raise NotImplementedError
