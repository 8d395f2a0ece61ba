"""The optimizers are the fused ones of torch, bit for bit; RMSprop, which has none, its default one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.kfac import KFAC
from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.optim.registry import OPTIMIZERS

SHAPES = [(5, 7), (33,), (), (2, 3, 4), (1,)]
LR = 0.05

CASES: list[tuple[str, dict[str, Any], type[torch.optim.Optimizer]]] = [
    ("sgd", {}, torch.optim.SGD),
    ("sgd", {"weight_decay": 0.01}, torch.optim.SGD),
    ("sgd", {"momentum": 0.9}, torch.optim.SGD),
    ("sgd", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, torch.optim.SGD),
    ("adagrad", {}, torch.optim.Adagrad),
    ("adagrad", {"eps": 1e-6, "weight_decay": 0.1}, torch.optim.Adagrad),
    ("rmsprop", {}, torch.optim.RMSprop),
    ("rmsprop", {"alpha": 0.9, "eps": 1e-6, "momentum": 0.8, "weight_decay": 0.1}, torch.optim.RMSprop),
    ("adam", {}, torch.optim.Adam),
    ("adam", {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}, torch.optim.Adam),
    ("adamw", {}, torch.optim.AdamW),
    ("adamw", {"betas": (0.8, 0.95), "weight_decay": 0.2}, torch.optim.AdamW),
]
IDS = [f"{kind}-{'-'.join(arguments) or 'defaults'}" for kind, arguments, _ in CASES]


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """Return gradients: each parameter lacks one on some steps, one of them on the first, and all on step 7."""
    generator = torch.Generator().manual_seed(1000 + step)
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    return [None if (step + 2 * index) % 5 == 1 or step == 7 else grad for index, grad in enumerate(made)]


def named(params: list[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"layer.{index}", parameter) for index, parameter in enumerate(params)]


def initialised(kind: str, arguments: dict[str, Any], params: list[Tensor]) -> Optimizer:
    optimizer = make_optimizer(kind, **arguments)
    optimizer.init(named(params))
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "arguments", "torch_kind"), CASES, ids=IDS)
def test_a_hundred_steps_equal_torch_bit_for_bit(
    kind: str, arguments: dict[str, Any], torch_kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    params = parameters(dtype)
    optimizer = initialised(kind, arguments, params)
    references = [p.clone().requires_grad_() for p in params]
    fused = {} if kind == "rmsprop" else {"fused": True}
    reference = torch_kind(references, lr=LR, **fused, **arguments)  # type: ignore[call-arg]
    if kind == "sgd" and "momentum" in arguments:
        for parameter in references:  # torch's fused SGD fails where one of them begins later than the others
            reference.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    for step in range(1, 101):
        lr = LR / (1 + step % 3)
        grads = gradients(step, dtype)
        kept = [None if grad is None else grad.clone() for grad in grads]
        for parameter, grad in zip(references, grads, strict=True):
            parameter.grad = None if grad is None else grad.clone()
        reference.param_groups[0]["lr"] = lr
        reference.step()
        optimizer.step(params, grads, lr)
        for own, theirs in zip(params, references, strict=True):
            assert torch.equal(own, theirs)
        for grad, before in zip(grads, kept, strict=True):
            assert grad is None or (before is not None and torch.equal(grad, before)), "gradients are read only"


# In float16 torch's own step of Adam divides by zero: `eps` is less than its least number.
@pytest.mark.parametrize(
    ("kind", "arguments", "torch_kind", "dtype"),
    [*((*case, torch.bfloat16) for case in CASES), *((*case, torch.float16) for case in CASES if case[0] == "sgd")],
)
def test_numbers_of_16_bits_move_as_in_torch(
    kind: str, arguments: dict[str, Any], torch_kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    params = parameters(dtype)
    optimizer = initialised(kind, arguments, params)
    references = [p.clone().requires_grad_() for p in params]
    reference = torch_kind(references, lr=LR, foreach=False, **arguments)  # type: ignore[call-arg]
    for _ in range(3):
        grads = [torch.randn_like(parameter) for parameter in params]
        for parameter, grad in zip(references, grads, strict=True):
            parameter.grad = grad.clone()
        reference.step()
        optimizer.step(params, grads, LR)
    rounding = 16 * torch.finfo(dtype).eps
    for own, theirs in zip(params, references, strict=True):
        torch.testing.assert_close(own, theirs.detach(), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if not issubclass(OPTIMIZERS.find(kind), KFAC)])
def test_an_optimizer_restored_from_its_tensors_goes_on_bit_for_bit(kind: str) -> None:
    arguments = {"momentum": 0.9} if kind in ("sgd", "rmsprop") else {}
    params = parameters()
    optimizer = initialised(kind, arguments, params)
    for step in range(1, 4):
        optimizer.step(params, gradients(step), LR)
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    restored_params = [p.clone() for p in params]
    restored = initialised(kind, arguments, restored_params)
    restored.load_state_tensors(saved)
    for step in range(4, 30):
        optimizer.step(params, gradients(step), LR)
        restored.step(restored_params, gradients(step), LR)
    for own, theirs in zip(params, restored_params, strict=True):
        assert torch.equal(own, theirs)
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, restored.state_tensors()[name])


def test_state_tensors_are_named_by_parameter_and_slot() -> None:
    params = parameters()
    optimizer = initialised("adam", {}, params)
    optimizer.step(params, gradients(2), LR)
    names = {f"layer.{index}.{slot}" for index in range(len(SHAPES)) for slot in ("step", "exp_avg", "exp_avg_sq")}
    assert set(optimizer.state_tensors()) == names
    assert initialised("sgd", {"momentum": 0.9}, params).state_tensors() == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("layer.0.exp_avg"), "lacks 'layer.0.exp_avg'"),
        (lambda state: state.update({"other.exp_avg": torch.zeros(1)}), "has 'other.exp_avg'"),
        (lambda state: state.update({"layer.0.exp_avg": torch.zeros(2)}), r"shape \[2\]; this model needs \[5, 7\]"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(change: Any, message: str) -> None:
    params = parameters()
    optimizer = initialised("adam", {}, params)
    optimizer.step(params, gradients(2), LR)
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    damaged = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    change(damaged)
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_tensors(damaged)
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, before[name])


def test_parameters_that_require_gradients_are_updated_in_place() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer("sgd")
    optimizer.init([("w", parameter)])
    optimizer.step([parameter], [torch.ones(2)], 0.5)
    assert parameter.tolist() == [0.5, 0.5]


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sdg' is not an optimizer; there are sgd"):
        make_optimizer("sdg")
    with pytest.raises(ValueError, match="Expected 5 parameters"):
        initialised("sgd", {}, parameters()).step([], [], LR)
