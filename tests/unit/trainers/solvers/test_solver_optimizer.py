"""A solver's state among the tensors of a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.trainers.solvers.solver_optimizer import SolverOptimizer


def made(history: int = 2, model: nn.Module | None = None) -> SolverOptimizer:
    model = nn.Linear(3, 2) if model is None else model
    optimizer = SolverOptimizer(model, lambda: 0, "lbfgs", lr=1.0, weight_decay=0.0, history=history)
    optimizer.init(list(model.named_parameters()))
    return optimizer


def test_the_state_is_copied_by_its_names() -> None:
    one, other = made(), made()
    for tensor in one.state_tensors().values():
        tensor.normal_()
    other.load_state_tensors(one.state_tensors())
    assert {name for name in one.state_tensors() if "gradient" in name} == {"solver.gradient"}
    for name, tensor in other.state_tensors().items():
        assert torch.equal(tensor, one.state_tensors()[name])
        assert tensor.data_ptr() != one.state_tensors()[name].data_ptr()


def test_the_state_of_another_solver_or_model_is_refused_and_changes_nothing() -> None:
    optimizer = made()
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    for other in (made(history=3), made(model=nn.Linear(4, 2))):
        with pytest.raises(CheckpointError, match=r"does not fit lbfgs and this model: 'solver\."):
            optimizer.load_state_tensors(other.state_tensors())
    with pytest.raises(CheckpointError, match=r"'momentum' differs"):
        optimizer.load_state_tensors({**before, "momentum": torch.zeros(1)})
    assert all(torch.equal(before[name], tensor) for name, tensor in optimizer.state_tensors().items())


def test_complex_parameters_are_refused() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="the parameter 'weight' is not of real numbers"):
        made(model=model)
