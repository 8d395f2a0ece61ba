"""One stage at work: its backward pass in halves is the whole one, and what it holds goes when it should."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from orchestray.platform.data.stream import MicroBatch
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.rng import RngKey
from orchestray.trainers.parallel.pipeline.links import Values
from orchestray.trainers.parallel.pipeline.runner import Job, StageForward, StageRunner
from orchestray.trainers.tasks.transformer import Block
from support.pipelines import CPU, Regression

torch.set_num_threads(1)
WIDTH = 8


class Twice(nn.Module):
    """A module that uses one layer two times, with others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shared(self.between(torch.tanh(self.shared(x))))
        return y


class Skip(nn.Module):
    """Two values in and out; the second output has parameters alone behind it, and the first input goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.free = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x) * y, (self.free * 2).tanh(), x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return x + y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y


MODULES: Mapping[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True)), [(4, 8)]),
    "inplace first": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), [(4, 8)]),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)), [(4, 8)]),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten()),
        [(4, 3, 8, 8)],
    ),
    "transformer": (lambda: nn.Sequential(Block(8, 2, 0.0), Block(8, 2, 0.0)), [(2, 5, 8)]),
    "attention": (Attention, [(2, 5, 8)]),
    "recurrent": (Recurrent, [(2, 5, 8)]),
    "used twice": (Twice, [(4, 8)]),
    "parametrized": (lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)), [(4, 8)]),
    "skip": (Skip, [(3, 8), (3, 8)]),
    "frozen": (lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 8)), [(4, 8)]),
    "no parameters": (nn.Tanh, [(4, 8)]),
}


class Tuple(nn.Module):
    """A stage of a module that returns one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        outputs = self.inner(*values)
        return outputs if isinstance(outputs, tuple) else (outputs,)


def runner_of(module: nn.Module, *, is_first: bool = False, is_last: bool = False) -> StageRunner:
    forward = StageForward(Regression(), module, "float64", CPU, is_first=is_first, is_last=is_last)  # type: ignore[arg-type]
    return StageRunner(1, forward, RngKey(), 3)


def job_of(batch: dict[str, Tensor] | None = None, number: int = 0) -> Job:
    batch = batch or {}
    return Job(batch, MicroBatch(batch, 4, np.arange(4)), 0.5, 7, number)


class Operations(TorchDispatchMode):
    """A counter of the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def through(module: nn.Module, shapes: list[tuple[int, ...]], *, split: bool) -> tuple[list[Any], dict[str, Any], Any]:
    """Run two micro-batches forward and backward.

    Return the gradients of inputs and of weights, and the operations that were computed.
    """
    runner = runner_of(Tuple(module))
    found: list[Any] = []
    operations = Operations()
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        inputs = tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        sent, _ = runner.forward(number, Values(inputs, (True,) * len(inputs)), job_of())
        gradients = [
            torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in sent.tensors if t is not None
        ]
        assert runner.expects_gradients(number)
        runner.take_gradients(number, gradients)
        before = weights_of(module)
        with operations:
            if split:
                found += runner.backward_input(number, job_of())
                assert same(weights_of(module), before), "the first half leaves the weights' gradients alone"
                runner.backward_weight(number, job_of())
            else:
                found += runner.backward(number, job_of())
        assert runner.num_live == 0
    return found, weights_of(module), operations.counts


def weights_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def same(left: Any, right: Any) -> bool:
    pairs = zip(left.values(), right.values(), strict=True) if isinstance(left, dict) else zip(left, right, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("name", MODULES)
def test_the_two_halves_of_a_backward_pass_are_the_whole_bit_for_bit(name: str) -> None:
    make, shapes = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    whole = through(copy.deepcopy(module), shapes, split=False)
    halves = through(module, shapes, split=True)
    assert same(halves[0], whole[0])
    assert same(halves[1], whole[1])


@pytest.mark.parametrize("name", ["linear", "transformer", "parametrized"])
def test_no_matrix_product_is_computed_in_both_halves(name: str) -> None:
    make, shapes = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    *_, whole = through(copy.deepcopy(module), shapes, split=False)
    *_, halves = through(module, shapes, split=True)
    products = {operation for operation in whole if "mm" in operation}
    assert products
    assert {operation: halves[operation] for operation in products} == {op: whole[op] for op in products}


def test_hooks_on_parameters_are_called_once_a_backward_pass_in_halves_too() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    called: Counter[int] = Counter()
    for index, parameter in enumerate(module.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: called.update([index]))  # type: ignore[misc]
    through(module, [(4, 8)], split=True)
    assert called == dict.fromkeys(range(4), 2)


def test_a_first_stage_does_its_whole_backward_pass_in_the_second_half() -> None:
    module = nn.Linear(8, 8).double()
    runner = runner_of(Tuple(module), is_first=True)
    sent, _ = runner.forward(0, None, job_of({"inputs": torch.ones(4, 8)}))
    assert sent.needs_gradient == (True,)
    assert not runner.gives_gradients(0)
    runner.take_gradients(0, [torch.ones(4, 8, dtype=torch.float64)])
    assert runner.backward_input(0, job_of()) == []
    assert module.weight.grad is None
    runner.backward_weight(0, job_of())
    assert module.weight.grad is not None
    assert runner.num_live == 0


def test_values_without_gradients_pass_and_get_none_back() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            return x * mask, mask, index + 1

    runner = runner_of(Masked())
    given = (torch.ones(2, 3, dtype=torch.float64), torch.tensor([[True], [False]]), torch.arange(2))
    sent, _ = runner.forward(0, Values(given, (True, False, False)), job_of())
    assert sent.needs_gradient == (True, False, False)
    assert [t.dtype for t in sent.tensors if t is not None] == [torch.float64, torch.bool, torch.int64]
    runner.take_gradients(0, [torch.ones(2, 3, dtype=torch.float64), None, None])
    gradient, *others = runner.backward(0, job_of())
    assert gradient is not None
    assert gradient.tolist() == [[1.0] * 3, [0.0] * 3]
    assert others == [None, None]


def test_the_last_stage_weighs_the_loss_and_gives_its_plain_value() -> None:
    runner = runner_of(Tuple(nn.Identity()), is_last=True)
    batch = {"inputs": torch.zeros(2, 3), "targets": torch.zeros(2, 3)}
    given = torch.full((2, 3), 2.0, dtype=torch.float64)
    _, loss = runner.forward(0, Values((given,), (True,)), job_of(batch))
    assert loss == 4.0
    (gradient,) = runner.backward(0, job_of(batch))
    assert gradient is not None
    torch.testing.assert_close(gradient, torch.full((2, 3), 0.5 * 2 * 2 / 6, dtype=torch.float64), atol=0, rtol=1e-15)


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_an_error_of_the_model_names_step_and_worker(moment: str) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            if moment == "forward":
                raise RuntimeError("this is wrong")
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, _gradient: Tensor) -> Tensor:
            raise RuntimeError("this is wrong")

    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (Bad.apply(x),)  # type: ignore[no-untyped-call]

    runner = runner_of(Wrong())
    with pytest.raises(TrainingError, match=r"failed at step 7 on worker 3: RuntimeError: this is wrong"):  # noqa: PT012
        runner.forward(0, Values((torch.ones(2),), (True,)), job_of())
        runner.take_gradients(0, [torch.ones(2)])
        runner.backward(0, job_of())


def test_what_a_micro_batch_holds_is_freed_by_its_backward_pass() -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Token:
        """An object that lives as long as the graph."""

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.token = Token()
            alive.add(ctx.token)
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8).double()

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (Keep.apply(self.linear(x)),)  # type: ignore[no-untyped-call]

    gc.collect()
    gc.disable()  # what is freed is freed at once, not by the collector
    try:
        for halves in (False, True):
            runner = runner_of(Keeping())
            for number in range(3):
                runner.forward(number, Values((torch.ones(4, 8, dtype=torch.float64),), (True,)), job_of())
            assert len(alive) == runner.num_live == runner.peak_live == 3
            for number in range(3):
                runner.take_gradients(number, [torch.ones(4, 8, dtype=torch.float64)])
                if halves:
                    runner.backward_input(number, job_of())
                    runner.backward_weight(number, job_of())
                else:
                    runner.backward(number, job_of())
                assert len(alive) == runner.num_live == 2 - number
            assert runner.peak_live == 3
    finally:
        gc.enable()


def test_outputs_are_not_kept_for_the_backward_pass() -> None:
    runner = runner_of(Tuple(nn.Linear(8, 8).double()))
    sent, _ = runner.forward(0, Values((torch.ones(4, 8, dtype=torch.float64),), (True,)), job_of())
    (output,) = sent.tensors
    assert output is not None
    gone = weakref.ref(output)
    del sent, output
    assert gone() is None
    assert runner.num_live == 1
