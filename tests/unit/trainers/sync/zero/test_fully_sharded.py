"""Sharding the parameters too (ZeRO 3, on FSDP2) changes nothing but the memory and the bytes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from orchestray.platform.comm.collective import Collective, ring_bytes
from orchestray.trainers.core.batch_norm import sync_statistics, synchronize
from orchestray.trainers.core.exchange import MAX_EXTRAS
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.survey.zero_memory import held_bytes
from orchestray.trainers.sync.allreduce.allreduce import AllReduce
from orchestray.trainers.sync.zero.fully_sharded import FullySharded
from support.fully_sharded import Stack, one_step, trained
from support.layouts import layout_settings, train_laid_out
from support.sharding import assert_equal, awkward, bits_of, put_together, trained_alone
from support.threads import run_replicas
from support.training import Rows

MODEL = awkward()
sharded = functools.cache(trained)


# Of three, some hold nothing of a parameter or have no samples; no optimizer but lars, which needs norms, sees that.
@pytest.mark.parametrize(("size", "optimizer"), [(3, "adam"), (3, "lars"), (2, "sgd"), (2, "rmsprop"), (2, "adagrad")])
def test_weights_and_optimizer_state_equal_those_of_one_process(size: int, optimizer: str) -> None:
    expected, losses = trained_alone(awkward(), optimizer)
    found, trainings = sharded(MODEL, size, optimizer)
    assert_equal(found, expected)
    for training in trainings:
        assert training.losses == pytest.approx(losses, rel=1e-12)


class Wrapped:
    """An answer of a user's own class, unknown to pytrees."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 400), nn.Linear(400, 5)

    def forward(self, inputs: Tensor) -> Wrapped:
        return Wrapped(self.last(self.first(inputs).tanh()))


class Unwrapping(Rows):
    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(outputs.values, batch)

    def metrics(self, outputs: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


def test_outputs_in_an_object_of_any_class_train_as_plain_ones() -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(48, 6)), rng.integers(0, 5, size=48)
    weights = [
        train_laid_out(
            lambda: Unwrapping(inputs, targets, Wrapping), layout_settings({"data": 2, "microbatches": None}, exchange)
        ).weights
        for exchange in ({"shard": "none"}, {"shard": "parameters"})
    ]
    assert_equal(weights[1], weights[0])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_on_two_replicas_whose_rows_fill_registers_all_bits_are_those_of_the_all_reduce(optimizer: str) -> None:
    expected = bits_of(AllReduce, optimizer)
    assert_equal(bits_of(lambda: FullySharded(smallest_unit_bytes=0), optimizer), expected, 0.0)


def test_reducing_each_micro_batch_or_the_sum_of_them_gives_the_same() -> None:
    each, trainings_each = sharded(MODEL, 3, "adam")
    once, trainings_once = trained(MODEL, 3, reduce_each=False)
    assert_equal(once, each)
    for a, b in zip(trainings_once, trainings_each, strict=True):
        assert a.collective.bytes_sent < b.collective.bytes_sent


def test_one_replica_is_left_as_it_is() -> None:
    expected, _ = trained_alone(awkward(), "adam")
    found, (training,) = trained(awkward(), 1)
    assert_equal(found, expected, 0.0)
    assert training.collective.bytes_sent == 0


@pytest.mark.parametrize(("size", "reduce_each", "passes"), [(2, True, 3), (3, True, 1), (3, False, 3)])
def test_bytes_sent_per_step_are_three_times_the_parameters(size: int, reduce_each: bool, passes: int) -> None:
    def replica(collective: Collective) -> tuple[int, int]:
        model = Stack()
        exchange = FullySharded(reduce_each=reduce_each, smallest_unit_bytes=0)
        exchange.attach(model, collective)
        one_step(exchange, model, passes)
        first = collective.bytes_sent
        one_step(exchange, model, passes)
        return first, collective.bytes_sent

    parameters = list(Stack().parameters())
    each = sum(parameter.nbytes for parameter in parameters) * (size - 1) // size
    num_reduced = passes if reduce_each else 1
    operations = 4 * (2 * passes + num_reduced) + 1  # of four layers, and the one rest
    extras = ring_bytes(torch.zeros(len(parameters) + size * MAX_EXTRAS, dtype=torch.float64), size)
    expected = (2 * passes + num_reduced) * each + operations * 8 * (size - 1) + extras
    assert run_replicas(size, replica) == [(expected, 2 * expected)] * size


@pytest.mark.parametrize("size", [2, 3])
def test_held_bytes_are_one_of_n_parts_of_everything(size: int) -> None:
    """Check ZeRO, section 3 and figure 1, with four bytes a number: parameters 4, gradients 4, Adam's state 8."""

    def held(exchange: Any, model: nn.Module, collective: Collective) -> dict[str, int]:
        exchange.attach(model, collective)
        optimizer = make_optimizer("adam")
        optimizer.init((update.name, update.tensor) for update in exchange.updates())
        one_step(exchange, model)
        return held_bytes(exchange, optimizer)

    psi = 4 * sum(parameter.numel() for parameter in Stack().parameters())
    steps = 4 * len(list(Stack().parameters()))  # Adam's counters, one a parameter
    expected = {"parameters": psi // size, "gradients": psi // size, "optimizer": 2 * psi // size + steps}
    sharded = run_replicas(size, lambda c: held(FullySharded(smallest_unit_bytes=0), Stack(), c))
    assert sharded == [expected] * size
    whole = run_replicas(size, lambda c: held(AllReduce(), Stack(), c))
    if size == 2:
        assert sum(sharded[0].values()) <= 0.55 * sum(whole[0].values())


def test_a_layer_s_parameters_are_whole_only_while_it_is_called() -> None:
    def replica(collective: Collective) -> tuple[list[int], list[int]]:
        model = Stack()
        exchange = FullySharded(smallest_unit_bytes=0)
        exchange.attach(model, collective)
        counts: list[int] = []

        def count(*_: object) -> None:
            counts.append(sum(layer.weight.numel() == 24 * 24 and _is_whole(layer.weight) for layer in model.layers))

        for layer in model.layers:
            layer.register_forward_hook(count, prepend=True)  # before it is freed
        exchange.before_step(1)
        loss = model(torch.ones(2, 24)).sum()
        forward = list(counts)
        exchange.begin_backward(True)
        loss.backward()
        exchange.finish([])
        count()
        return forward, counts[-1:]

    for forward, after in run_replicas(2, replica):
        assert forward == [1, 1, 1, 1]
        assert after == [0]


def _is_whole(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter and parameter.untyped_storage().size() > 0


def test_the_next_layer_s_parameters_are_on_their_way_while_a_layer_computes() -> None:
    def replica(collective: Collective) -> list[list[bool]]:
        model = Stack()
        exchange = FullySharded(smallest_unit_bytes=0)
        exchange.attach(model, collective)
        one_step(exchange, model)  # shows the order
        seen: list[list[bool]] = []
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: seen.append([unit.is_gathering for unit in exchange._units]))
        one_step(exchange, model)
        assert not any(unit.is_gathering for unit in exchange._units)
        return seen

    no, yes = False, True
    expected = [[no, yes, no, no], [no, no, yes, no], [no, no, no, yes], [no, no, no, no]]
    assert run_replicas(2, replica) == [expected, expected]


class Branching(nn.Module):
    """A network whose samples each go through one of two layers, by what they hold; `norm` has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        goes_left = x[:, 1] > 0
        y = h.new_zeros(len(x), 4)
        if goes_left.any():
            y = y.index_add(0, goes_left.nonzero()[:, 0], self.left(h[goes_left]))
        if not goes_left.all():
            y = y.index_add(0, (~goes_left).nonzero()[:, 0], self.right(h[~goes_left]))
        return y


@pytest.mark.parametrize("reduce_each", [True, False])
def test_replicas_may_take_different_branches_and_different_numbers_of_passes(reduce_each: bool) -> None:
    torch.manual_seed(0)
    model = Branching().double().eval()
    x, y = torch.randn(10, 6, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64)
    parts = [
        [(0, 1), (1, 2), (2, 4)],  # the first replica's three micro-batches of one or two samples
        [],
        [(4, 10)],
    ]

    def replica(collective: Collective) -> dict[str, tuple[TensorSlice, Tensor | None]]:
        own = copy.deepcopy(model)
        exchange = FullySharded(reduce_each=reduce_each, smallest_unit_bytes=0)
        exchange.attach(own, collective)
        for step in (1, 2):
            exchange.before_step(step)
            share = parts[collective.rank]
            for number, (start, stop) in enumerate(share, start=1):
                loss = ((own(x[start:stop]) - y[start:stop]) ** 2).sum()
                exchange.begin_backward(number == len(share))
                loss.backward()
            exchange.finish([])
        return {u.name: (u.piece, g) for u, g in zip(exchange.updates(), exchange.gradients(), strict=True)}

    ((model(x) - y) ** 2).sum().backward()
    results = run_replicas(3, replica)
    for name, parameter in model.named_parameters():
        found = torch.full_like(parameter, torch.nan)
        for result in results:
            piece, gradient = result[name]
            assert gradient is not None, name
            piece.put(found, gradient)
        torch.testing.assert_close(found, parameter.grad, atol=1e-12, rtol=1e-12)


def test_a_validation_with_different_numbers_of_batches_ends_and_sees_the_updated_weights() -> None:
    torch.manual_seed(0)
    original = Branching().double().eval()
    x = torch.randn(9, 6, dtype=torch.float64)

    def replica(collective: Collective) -> tuple[list[Tensor], dict[str, Any]]:
        model = copy.deepcopy(original)
        exchange = FullySharded(smallest_unit_bytes=0)
        exchange.attach(model, collective)
        seen = []
        for step in (1, 2):
            with torch.no_grad():
                # The first replica has three batches, the second one, the third none.
                seen += [model(x[3 * number : 3 * number + 3]) for number in range([3, 1, 0][collective.rank])]
            exchange.rest()
            collective.barrier()
            exchange.before_step(step)
            loss = model(x).sum()
            exchange.begin_backward(True)
            loss.backward()
            exchange.finish([])
            for update, gradient in zip(exchange.updates(), exchange.gradients(), strict=True):
                assert gradient is not None
                update.tensor.sub_(gradient, alpha=0.1)
            exchange.after_step(step)
        return seen, {}

    plain, expected = copy.deepcopy(original), []
    for _ in (1, 2):
        expected.append(plain(x).detach())
        plain.zero_grad()
        (3 * plain(x).sum()).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
    results = run_replicas(3, replica)
    first, second = torch.cat(results[0][0]).split(9)
    torch.testing.assert_close(first, expected[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(second, expected[1], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(results[1][0][1], expected[1][:3], atol=1e-12, rtol=1e-12)


def test_batch_normalisation_over_the_replicas_and_its_buffers_equal_one_process() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(9, 6, dtype=torch.float64)

    def replica(collective: Collective) -> tuple[dict[str, Any], dict[str, Any]]:
        model = synchronize(copy.deepcopy(original), lambda: collective)
        exchange = FullySharded(smallest_unit_bytes=0)
        exchange.attach(model, collective)
        exchange.before_step(1)
        loss = (model(x[[slice(0, 2), slice(2, 9)][collective.rank]]) ** 2).sum()
        exchange.begin_backward(True)
        loss.backward()
        exchange.finish([])
        sync_statistics(model, collective, [2, 7][collective.rank], 9)
        gradients = zip(exchange.updates(), exchange.gradients(), strict=True)
        return {u.name: (u.piece, g) for u, g in gradients}, {
            name: (held.piece, held.tensor) for name, held in exchange.held().items()
        }

    results = run_replicas(2, replica)
    (original(x) ** 2).sum().backward()
    assert_equal(
        put_together([gradients for gradients, _ in results]),
        {name: p.grad for name, p in original.named_parameters() if p.grad is not None},
    )
    expected = {name: value.double() for name, value in original.state_dict().items()}
    assert_equal(put_together([held for _, held in results]), expected)


class Recomputing(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda value, layer=layer: torch.tanh(layer(value)), x, use_reentrant=False)
        return x


@pytest.mark.parametrize("kind", [Stack, Recomputing])
def test_several_forward_passes_before_the_backward_ones_as_a_pipeline_makes_them(kind: type[Stack]) -> None:
    torch.manual_seed(0)
    original = kind(12).double()
    x = torch.randn(6, 12, dtype=torch.float64)

    def replica(collective: Collective) -> dict[str, Any]:
        model = copy.deepcopy(original)
        exchange = FullySharded(smallest_unit_bytes=0)
        exchange.attach(model, collective)
        exchange.before_step(1)
        rows = x[collective.rank :: 2]
        losses = [(model(rows[index : index + 1]) ** 2).sum() for index in range(3)]
        for number, loss in enumerate(losses, start=1):
            exchange.begin_backward(number == 3)
            loss.backward()
        exchange.finish([])
        return {u.name: (u.piece, g) for u, g in zip(exchange.updates(), exchange.gradients(), strict=True)}

    (original(x) ** 2).sum().backward()
    expected = {name: p.grad for name, p in original.named_parameters() if p.grad is not None}
    assert_equal(put_together(run_replicas(2, replica)), expected)


def halve(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(0.5)


class Masked(nn.Module):
    """A model in which hooks on gradients keep some weights as they are, and halve the others' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        mask = torch.arange(12).view(4, 3) % 3
        self.first.weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[no-untyped-call]
        self.last.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y


def test_hooks_on_gradients_of_parameters_see_whole_ones_as_in_one_process() -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(24, 3)), rng.integers(0, 2, size=24)

    def task() -> Rows:
        return Rows(inputs, targets, Masked)

    alone = train_laid_out(task, layout_settings({"microbatches": None}, batch_size=8))
    network, exchange = {"microbatches": None, "data": 2}, {"shard": "parameters"}
    found = train_laid_out(task, layout_settings(network, exchange, batch_size=8))
    assert_equal(found.weights, alone.weights)


class Viewed(nn.Module):
    """A model that returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y[:, :2]


class Tempered(Rows):
    """A task whose loss changes the outputs in place."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(outputs.mul_(0.5), batch)


def test_a_view_that_a_model_returns_may_be_changed_in_place() -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(24, 3)), rng.integers(0, 2, size=24)

    def task() -> Rows:
        return Tempered(inputs, targets, Viewed)

    alone = train_laid_out(task, layout_settings({"microbatches": None}, batch_size=8))
    network, exchange = {"microbatches": None, "data": 2}, {"shard": "parameters"}
    found = train_laid_out(task, layout_settings(network, exchange, batch_size=8))
    assert_equal(found.weights, alone.weights)
