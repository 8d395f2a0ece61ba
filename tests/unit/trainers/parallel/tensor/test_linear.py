"""Fully connected layers split over a group compute what the whole layers do, and send what the formulas say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.apply import split_model
from support.split_models import assert_close, build, check_split
from support.threads import run_replicas

SAMPLES = 6
DOUBLE = 8  # bytes


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "plan",
    [
        {"0": "output", "2": "input"},
        {"0": "output", "2": "input", "4": "output_gathered"},
        {"0": "output_gathered", "2": "output_gathered", "4": "input_scattered"},
        {"0": "input_scattered", "2": "input_scattered"},
    ],
    ids=["pair", "pair and lone", "gathered", "scattered"],
)
def test_split_layers_train_as_the_plain_ones(plan: dict[str, str], size: int) -> None:
    check_split(mlp, plan, numbers(SAMPLES, 5), size)


def test_layers_without_bias_and_inputs_of_three_dimensions() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 9, bias=False), nn.ReLU(), nn.Linear(9, 3, bias=False), nn.Linear(3, 6))

    check_split(make, {"0": "output", "2": "input", "3": "output_gathered"}, numbers(2, 3, 4), 2)


def test_batch_normalisation_and_slopes_between_split_layers() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 7), nn.BatchNorm1d(7), nn.PReLU(), nn.PReLU(7), nn.Linear(7, 3), nn.BatchNorm1d(3)
        )

    plan = {"0": "output", "1": "features", "2": "features", "3": "features", "4": "input"}
    workers = check_split(make, plan, numbers(SAMPLES, 5), 2)
    assert workers[0][0].partial == {"2.weight"}
    assert workers[0][0].pieces["1.running_mean"].local_shape == (4,)


def test_frozen_parameters_stay_frozen_and_get_no_gradient() -> None:
    def make() -> nn.Module:
        model = mlp()
        model[0].weight.requires_grad_(False)
        return model

    workers = check_split(make, {"0": "output", "2": "input"}, numbers(SAMPLES, 5), 2)
    assert "0.weight" not in workers[0][1].gradients[0]


def test_an_empty_batch_passes() -> None:
    def run(group: Collective) -> Tensor:
        model = build(mlp)
        plan = {"0": "output", "2": "input", "4": "output_gathered"}
        split_model(model, plan, lambda: group, group.rank, group.size)
        y: Tensor = model(numbers(0, 5))
        y.sum().backward()
        return y

    assert [list(y.shape) for y in run_replicas(2, run)] == [[0, 5], [0, 5]]


@pytest.mark.parametrize("size", [2, 4])
def test_a_split_pair_sends_one_all_reduce_forward_and_one_backward(size: int) -> None:
    def run(group: Collective) -> tuple[list[str], int, int]:
        model = build(mlp)[:3]
        counted = Counted(group)
        split_model(model, {"0": "output", "2": "input"}, lambda: counted, group.rank, group.size)  # type: ignore[arg-type, return-value]
        x = numbers(SAMPLES, 5).requires_grad_()
        y = model(x)
        forward = list(counted.calls), group.bytes_sent
        y.sum().backward()
        assert counted.calls == ["all_reduce", "all_reduce"]
        return (*forward, group.bytes_sent - forward[1])

    for calls, forward, backward in run_replicas(size, run):
        assert calls == ["all_reduce"]
        assert forward == -(-2 * (size - 1) * SAMPLES * 7 * DOUBLE // size)
        assert backward == -(-2 * (size - 1) * SAMPLES * 5 * DOUBLE // size)


@pytest.mark.parametrize("size", [2, 4])
def test_a_lone_layer_sends_samples_times_features(size: int) -> None:
    """Split by output: all-gather of N x Cout forward, all-reduce of N x Cin backward; by input: turned round."""

    def run(group: Collective, style: str) -> tuple[list[str], int, int]:
        model, counted = nn.Sequential(nn.Linear(8, 12)).double(), Counted(group)
        split_model(model, {"0": style}, lambda: counted, group.rank, group.size)  # type: ignore[arg-type, return-value]
        y = model(numbers(SAMPLES, 8).requires_grad_())
        forward = group.bytes_sent
        y.sum().backward()
        return counted.calls, forward, group.bytes_sent - forward

    gather_out, gather_in = ((size - 1) * SAMPLES * width * DOUBLE // size for width in (12, 8))
    for calls, forward, backward in run_replicas(size, lambda group: run(group, "output_gathered")):
        assert calls == ["all_gather", "all_reduce"]
        assert (forward, backward) == (gather_out, 2 * gather_in)
    for calls, forward, backward in run_replicas(size, lambda group: run(group, "input_scattered")):
        assert calls == ["all_reduce", "all_gather"]
        assert (forward, backward) == (2 * gather_out, gather_in)


def test_a_first_layer_sends_nothing_backward() -> None:
    workers = check_split(mlp, {"0": "output", "2": "input"}, numbers(SAMPLES, 5), 2)
    assert [trained.bytes_backward for _, trained in workers] == [0, 0]
    assert [trained.bytes_forward for _, trained in workers] == [SAMPLES * 7 * DOUBLE] * 2


def test_a_backward_pass_in_two_halves_sends_once() -> None:
    """Compute inputs' gradients first, weights' later, as schedules without bubbles want it."""
    plain = build(mlp)[:3]
    x = numbers(SAMPLES, 5).requires_grad_()
    plain(x).square().sum().backward()

    def run(group: Collective) -> int:
        model = build(mlp)[:3]
        split_model(model, {"0": "output", "2": "input"}, lambda: group, group.rank, group.size)
        own = numbers(SAMPLES, 5).requires_grad_()
        loss = model(own).square().sum()
        before = group.bytes_sent
        (dx,) = torch.autograd.grad(loss, [own], retain_graph=True)
        sent = group.bytes_sent - before
        weights = torch.autograd.grad(loss, list(model.parameters()))
        assert x.grad is not None
        assert plain[2].bias.grad is not None
        assert_close(dx, x.grad, 1e-12, "input")
        assert_close(weights[-1], plain[2].bias.grad, 1e-12, "bias")
        assert group.bytes_sent - before == sent, "the weights' gradients need nothing of the others"
        return sent

    assert run_replicas(2, run) == [SAMPLES * 5 * DOUBLE] * 2


def test_weights_of_sixteen_bits_are_split_too() -> None:
    def run(group: Collective) -> Tensor:
        model = build(mlp).to(torch.bfloat16)
        split_model(model, {"0": "output", "2": "input"}, lambda: group, group.rank, group.size)
        with torch.no_grad():
            y: Tensor = model(numbers(SAMPLES, 5).to(torch.bfloat16))
        return y

    plain = build(mlp)(numbers(SAMPLES, 5))
    for y in run_replicas(2, run):
        assert y.dtype == torch.bfloat16
        assert torch.allclose(y.double(), plain, atol=0.1)


def test_autocast_reaches_split_layers() -> None:
    def run(group: Collective) -> tuple[Tensor, Tensor]:
        model = build(mlp).float()
        plan = {"0": "output", "2": "input", "4": "output_gathered"}
        split_model(model, plan, lambda: group, group.rank, group.size)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(numbers(SAMPLES, 5).float())
        y.float().sum().backward()
        return y, model[2].bias.grad

    plain_model = build(mlp).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = plain_model(numbers(SAMPLES, 5).float())
    plain.float().sum().backward()
    for y, gradient in run_replicas(2, run):
        assert y.dtype == plain.dtype
        assert torch.allclose(y.float(), plain.float(), atol=0.1)
        assert torch.allclose(gradient, plain_model[2].bias.grad, atol=0.1)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_lost_peer_surfaces_as_such(direction: str) -> None:
    def run(group: Collective) -> None:
        model = build(mlp)[:3]
        split_model(model, {"0": "output", "2": "input"}, lambda: group, group.rank, group.size)
        x = numbers(SAMPLES, 5).requires_grad_()
        y = model(x) if direction == "backward" else None
        if group.rank == 1:
            group.abort()
            return
        with pytest.raises(PeerLostError):
            model(x) if y is None else y.sum().backward()

    run_replicas(2, run)


@pytest.mark.parametrize(
    ("plan", "size", "sentence"),
    [
        ({"4": "output_gathered"}, 6, "has 5 output features, too few for a tensor degree of 6: a degree of up to 5"),
        ({"1": "output"}, 2, "which is for nn.Linear; it is a GELU"),
        ({"1": "features"}, 2, "for batch normalisation and PReLU after a layer of the style 'output'"),
    ],
)
def test_what_does_not_fit_is_refused(plan: dict[str, str], size: int, sentence: str) -> None:
    model = build(mlp)
    with pytest.raises(ConfigError, match=sentence):
        split_model(model, plan, lambda: None, 0, size)  # type: ignore[arg-type, return-value]
    assert torch.equal(model(numbers(SAMPLES, 5)), build(mlp)(numbers(SAMPLES, 5)))


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    for layer in (Doubled(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))):
        with pytest.raises(ConfigError, match="computes in a way of its own"):
            split_model(nn.Sequential(layer), {"0": "output"}, lambda: None, 0, 2)  # type: ignore[arg-type, return-value]


class Counted:
    """A group that notes which operations it is asked for."""

    def __init__(self, group: Collective) -> None:
        self._group = group
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(self._group, name)
        if callable(found):
            self.calls.append(name)
        return found
