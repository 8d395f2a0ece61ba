"""Fully connected layers that send inputs and errors: Project Adam, sufficient factor broadcasting, Poseidon."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.ps.protocol.encoding import GradientEncoder
from orchestray.trainers.ps.protocol.factors import FactorCapture
from orchestray.trainers.ps.protocol.partition import FlatModel, Partition
from orchestray.trainers.sync.allreduce import sufficient_factors
from orchestray.trainers.sync.allreduce.sufficient_factors import Factored
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.threads import run_replicas
from support.training import few_digits, furthest

ALEXNET_CONVOLUTIONS = [(3, 96, 11), (48, 256, 5), (256, 384, 3), (192, 384, 3), (192, 256, 3)]
"""Input features a filter sees, filters, side (Krizhevsky et al. 2012)."""
ALEXNET_FULLY_CONNECTED = [(9216, 4096), (4096, 4096), (4096, 1000)]


def factors_to_server(num_rows: int, in_features: int, out_features: int, num_workers: int) -> int:
    """Count the values that m workers send to a parameter server as factors: m N (out + in) (Project Adam)."""
    return num_workers * num_rows * (out_features + in_features)


def gradients_to_server(in_features: int, out_features: int, num_workers: int) -> int:
    """Count the values that m workers send to a parameter server as gradients: m out in."""
    return num_workers * out_features * in_features


def factors_to_all(num_rows: int, in_features: int, out_features: int, num_workers: int) -> int:
    """Count the values that P workers send if each broadcasts its factors, N rows each: P (P-1) N (out + in)."""
    return num_workers * (num_workers - 1) * num_rows * (out_features + in_features)


def task() -> Any:
    return few_digits()


def stepped(
    size: int, rows: list[int], make: Any, *, always: bool = False, shards: int = 0
) -> list[tuple[list[Tensor | None], dict[str, str], int, int]]:
    """Do one step of a model; return each replica's gradients, what was sent of each layer, and the bytes."""
    torch.manual_seed(0)
    models = [make().double() for _ in range(size)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(count, 20, dtype=torch.float64, generator=generator) for count in rows]

    def run(collective: Collective) -> tuple[list[Tensor | None], dict[str, str], int, int]:
        model, exchange = models[collective.rank], Factored(always=always, store_shards=shards)
        exchange.attach(model, collective)
        exchange.before_step(1)
        if rows[collective.rank]:
            model(inputs[collective.rank]).square().sum().backward()
        exchange.finish([])
        found = [None if g is None else g.clone() for g in exchange.gradients()]
        small = 8 * (sum(1 for _ in model.parameters()) + len(exchange.summary()) + 8 * size)
        told = -(-2 * (size - 1) * small // size) + (size - 1) * 8 * len(exchange.summary())
        sent = collective.own_bytes_sent
        return found, exchange.summary(), sent - told, sent + exchange.bytes_saved

    results = run_replicas(size, run)
    whole = make().double()
    whole.load_state_dict(models[0].state_dict())
    sum(whole(x).square().sum() for x in inputs if len(x)).backward()
    for found, _, _, _ in results:
        for got, parameter, same in zip(found, whole.parameters(), results[0][0], strict=True):
            if parameter.grad is None:
                assert got is None
                continue
            assert got is not None
            assert same is not None
            assert float((got - parameter.grad).abs().max()) <= 1e-12 * max(1.0, float(parameter.grad.abs().max()))
            assert torch.equal(got, same)
    return results


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10, bias=False))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_recomposed_sum_is_the_gradient_and_the_bytes_are_those_of_the_formula(size: int) -> None:
    """Count m - 1 messages of N (out + in) values from each; the bias comes with the errors."""
    for _, told, sent, dense in stepped(size, [3] * size, perceptron, always=True):
        assert told == {"0": "factors", "2": "factors"}
        assert sent == (size - 1) * 3 * ((20 + 30) + (30 + 10)) * 8
        assert dense > 0


def test_replicas_may_have_different_numbers_of_samples_or_none() -> None:
    results = stepped(3, [4, 2, 0], perceptron, always=True)
    assert [sent for _, _, sent, _ in results] == [2 * rows * (50 + 40) * 8 for rows in (4, 2, 0)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_layer_chooses_the_argmin_of_the_byte_formulas(size: int) -> None:
    """Take them from table 1 of Zhang et al. (2017): what a node moves if each of P has a P-th of the servers.

    An all-reduce of reduce-scatter and all-gather is these servers: each node sums its P-th, and sends it to all.
    """
    chosen = set()
    for rows in (1, 4, 6, 7, 12, 40):
        _, told, _, _ = stepped(size, [rows] * size, perceptron)[0]
        for name, (features_in, features_out) in {"0": (20, 30), "2": (30, 10)}.items():
            by_factors = 2 * rows * (size - 1) * (features_in + features_out)
            by_server = 2 * features_in * features_out * (size + size - 2) / size
            assert told[name] == ("factors" if by_factors < by_server else "gradient")
            chosen.add(told[name])
    assert chosen == {"factors", "gradient"}


def to_store(features_in: int, features_out: int, size: int, shards: int) -> float:
    """Count the values that a worker with a shard moves: 2 M N (P1 + P2 - 2) / P2 (Zhang et al. 2017, table 1)."""
    return 2 * features_in * features_out * (size + shards - 2) / shards


@pytest.mark.parametrize(("size", "shards"), [(2, 2), (3, 1), (4, 2), (4, 4)])
def test_each_layer_chooses_the_argmin_of_factors_for_all_and_the_store(size: int, shards: int) -> None:
    """Zhang et al. (2017), algorithm 1: factors if 2 K (P1 - 1) (M + N) <= 2 M N (P1 + P2 - 2) / P2, else the store."""
    chosen = dict[str, set[str]]({"0": set(), "2": set()})
    for rows in (1, 3, 4, 6, 7, 12, 13, 40):
        _, told, _, _ = stepped(size, [rows] * size, perceptron, shards=shards)[0]
        for name, (features_in, features_out) in {"0": (20, 30), "2": (30, 10)}.items():
            by_factors = 2 * rows * (size - 1) * (features_in + features_out)
            is_less = by_factors <= to_store(features_in, features_out, size, shards)
            assert told[name] == ("factors" if is_less else "store")
            chosen[name].add(told[name])
    assert chosen == {"0": {"factors", "store"}, "2": {"factors", "store"}}


@pytest.mark.parametrize(("size", "shards", "rows"), [(2, 2, 8), (3, 1, 8), (4, 2, 7), (4, 4, 5)])
def test_factors_to_all_and_the_store_send_the_bytes_of_their_formulas(size: int, shards: int, rows: int) -> None:
    """Count what each sends, of which it receives as much: half of table 1."""
    found = stepped(size, [rows] * size, perceptron, shards=shards)
    for rank, (_, told, sent, _) in enumerate(found):
        assert told == {"0": "factors", "2": "store"}
        broadcast = rows * (size - 1) * (20 + 30)
        stored = to_store(30, 10, size, shards) / 2 if rank < shards else 30 * 10
        assert sent == 8 * (broadcast + stored)


def test_the_choice_switches_at_n_equal_to_in_times_out_over_in_plus_out() -> None:
    """Compare sending to a server for any number of workers, and sending to each other with two."""
    for features_in, features_out in ((20, 30), (4096, 4096), (9216, 4096), (64, 8)):
        switch = features_in * features_out / (features_in + features_out)
        for rows in range(max(1, int(switch) - 2), int(switch) + 3):
            for workers in (1, 2, 7):
                by_factors = factors_to_server(rows, features_in, features_out, workers)
                by_gradient = gradients_to_server(features_in, features_out, workers)
                assert (by_factors < by_gradient) == (rows < switch)
            by_factors = factors_to_all(rows, features_in, features_out, 2)
            assert (by_factors < sufficient_factors.gradients_to_all(features_in, features_out, 2)) == (rows < switch)
    rows = [stepped(2, [n, n], perceptron)[0][1]["0"] for n in (11, 12, 13)]  # 20 * 30 / 50 = 12
    assert rows == ["factors", "gradient", "gradient"]


class AlexNet(nn.Module):
    """The layers of Krizhevsky et al. (2012), for images so small that its convolutions have few places."""

    def __init__(self) -> None:
        super().__init__()
        layers, inputs, stride = list[nn.Module](), 3, 4
        for depth, filters, side in ALEXNET_CONVOLUTIONS:
            layers += [nn.Conv2d(inputs, filters, side, stride, side // 2, groups=inputs // depth), nn.ReLU()]
            inputs, stride = filters, 1
        self.convolutions = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(6), nn.Flatten())
        one, two, three = (nn.Linear(features_in, out) for features_in, out in ALEXNET_FULLY_CONNECTED)
        self.connected = nn.Sequential(one, nn.ReLU(), two, nn.ReLU(), three)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.connected(self.convolutions(x))
        return y


def test_two_protocols_send_less_than_either_alone_for_alexnets_layers() -> None:
    """Send gradients of convolutions, factors of connected layers (Project Adam, section 3.3.1); 128 samples.

    Count the bytes of a worker's messages. No worker sends factors of convolutions: these are by their formula.
    """
    rows, value_bytes = 128, 4
    torch.manual_seed(0)
    model = AlexNet()
    flat, capture = FlatModel(model), FactorCapture(model, list(model.parameters()))
    flat.begin()
    model(torch.randn(rows, 3, 8, 8)).square().mean().backward()
    gradient = capture.gradient(flat.gradients)
    assert gradient is not None
    assert capture.run_report() == {
        **{f"convolutions.{number}": "gradient" for number in (0, 2, 4, 6, 8)},
        **{f"connected.{number}": "factors" for number in (0, 2, 4)},
    }
    encoder = GradientEncoder(Partition.of(model, 1), flat.values, None)
    both, by_gradients = (sum(each.nbytes for each in encoder.encode(0, of, 1)[1]) for of in (gradient, flat.gradient))
    convolutions = sum(depth * filters * side**2 for depth, filters, side in ALEXNET_CONVOLUTIONS)
    biases = sum(filters for _, filters, _ in ALEXNET_CONVOLUTIONS) + sum(out for _, out in ALEXNET_FULLY_CONNECTED)
    by_factors = sum(factors_to_server(rows, i, o, 1) for i, o in ALEXNET_FULLY_CONNECTED)
    table = 8 * 4 * 3 + 16 * (5 + 5 + 3)  # of three layers, and of the other parameters
    assert both == value_bytes * (convolutions + biases + by_factors) + table
    assert by_gradients == value_bytes * sum(parameter.numel() for parameter in model.parameters())
    assert by_gradients / both > 10
    # A convolution's factors have a row for every place of every sample (55 by 55 of the first, in the paper's images).
    places = (55, 27, 13, 13, 13)
    unfolded = [(depth * side**2, filters) for depth, filters, side in ALEXNET_CONVOLUTIONS]
    convolutions_by_factors = sum(
        factors_to_server(rows * place**2, i, o, 1) for place, (i, o) in zip(places, unfolded, strict=True)
    )
    assert both < value_bytes * (convolutions_by_factors + by_factors)


class Convolutional(nn.Module):
    """A network of two convolutions and two fully connected layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 4, 3), nn.Conv1d(4, 4, 3)
        self.third, self.last = nn.Linear(64, 48), nn.Linear(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x[:, None]).relu()).relu()
        y: Tensor = self.last(self.third(x.flatten(1)).relu())
        return y


def test_convolutions_send_gradients_and_fully_connected_layers_factors() -> None:
    _, told, sent, dense = stepped(2, [3, 3], Convolutional)[0]
    assert told == {"third": "factors", "last": "gradient"}
    convolutions = (3 * 4 + 4) + (3 * 4 * 4 + 4)
    assert sent == 8 * (convolutions + 3 * (64 + 48) + (48 * 2 + 2))
    assert sent < dense / 5
    assert sent < stepped(2, [3, 3], Convolutional, always=True)[0][2]


@pytest.mark.parametrize("size", [2, 4])
def test_each_replica_recomposes_the_factors_of_every_other(size: int) -> None:
    def run(collective: Collective) -> int:
        model, exchange = perceptron().double(), Factored(always=True)
        exchange.attach(model, collective)
        exchange.before_step(1)
        model(torch.ones(2, 20, dtype=torch.float64)).sum().backward()
        exchange.finish([])
        return exchange.num_recomposed

    assert run_replicas(size, run) == [2 * (size - 1)] * size


@cache
def single() -> LaidOut:
    return train_laid_out(task, layout_settings(steps=3))


@pytest.mark.parametrize(
    ("network", "exchange"),
    [
        ({"data": 2}, {"factors": "auto"}),
        ({"data": 3}, {"factors": "always"}),
        ({"data": 2, "pipeline": 2}, {"factors": "always"}),
        ({"data": 2, "tensor": 2}, {"factors": "always"}),
        ({"data": 2, "tensor": 2}, {"factors": "auto"}),  # layers cut up are smaller: another choice
        ({"data": 2}, {"factors": "auto", "store_shards": 2}),
        ({"data": 3}, {"factors": "auto", "store_shards": 2}),
        ({"data": 2, "pipeline": 2}, {"factors": "auto", "store_shards": 1}),
    ],
)
def test_training_with_factors_is_the_single_process(network: dict[str, Any], exchange: dict[str, Any]) -> None:
    one = single()
    found = train_laid_out(task, layout_settings(network, exchange, steps=3))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


class Tied(nn.Module):
    """A network of a weight that two layers use, a layer called twice, and a weight used without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.other = nn.Linear(20, 20), nn.Linear(20, 20)
        self.other.weight = self.tied.weight
        self.twice, self.aside = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.other(self.tied(x)).tanh()).tanh())
        return nn.functional.linear(x, self.aside.weight, self.aside.bias)


def test_a_layer_whose_factors_do_not_make_its_gradient_sends_the_gradient() -> None:
    told = stepped(2, [2, 3], Tied, always=True)[0][1]
    assert told == {"twice": "factors", "aside": "gradient"}


def test_an_unused_layer_has_no_gradient() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(20, 4), nn.Linear(20, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.used(x)
            return y

    assert stepped(2, [2, 2], Idle, always=True)[0][0][2] is None


def test_factors_grow_with_the_samples_and_gradients_do_not() -> None:
    sent = [stepped(2, [rows, rows], perceptron, always=True)[0][2] for rows in (2, 4, 8)]
    assert [b / a for a, b in pairwise(sent)] == [2, 2]
    assert stepped(2, [40, 40], perceptron)[0][2] == (20 * 30 + 30 + 30 * 10) * 8
