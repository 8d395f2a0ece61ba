"""Recomputed activations: what is held, what can go wrong, and what is where."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.core.rng import RngKey
from orchestray.trainers.parallel.recompute import ActivationMeter, Chain, find_blocks, recompute
from orchestray.trainers.parallel.recompute.chain import group, units_of
from orchestray.trainers.tasks.transformer import Block
from support.recomputing import (
    DEPTH,
    SAMPLES,
    WIDTH,
    assert_same,
    convolutions,
    encoder,
    everything,
    mlp,
    transformer,
)

# -- memory --------------------------------------------------------------------------------------------------------


def peak_of(model: nn.Module, x: Tensor, how: str) -> int:
    meter = ActivationMeter(model)
    changed = recompute(model, how, meter=meter)
    with meter.watching(x):
        model(x).square().mean().backward()
    changed.undo()
    assert meter.live_bytes == 0
    return meter.peak_bytes


def test_sqrt_keeps_about_two_square_roots_of_the_activations() -> None:
    model = mlp()
    x = torch.randn(SAMPLES, WIDTH)
    none = peak_of(model, x, "none")
    one = SAMPLES * WIDTH * 4
    assert none == DEPTH * one + SAMPLES * 3 * 4, "each ReLU's output, and the model's own for the square"
    # The inputs of all groups but the first, and what one of the groups holds inside.
    assert peak_of(model, x, "sqrt") <= (8 + 9) * one + SAMPLES * 3 * 4
    assert peak_of(model, x, "sqrt") <= 0.35 * none


def test_blocks_keep_their_inputs_and_what_is_inside_one() -> None:
    model = nn.Sequential(*(Block(WIDTH, 2, 0.0) for _ in range(8)))
    x = torch.randn(SAMPLES, 6, WIDTH)
    none, blocks = peak_of(model, x, "none"), peak_of(model, x, "blocks")
    inside = peak_of(model[:1], x, "none") - x.nbytes
    assert none > 7 * inside
    assert blocks <= inside + 8 * x.nbytes + x.nbytes


def test_what_a_segment_holds_goes_with_the_graph() -> None:
    model = mlp(9)
    meter = ActivationMeter(model)
    recompute(model, "sqrt", meter=meter)
    x = torch.randn(SAMPLES, WIDTH)
    with meter.watching(x):
        loss = model(x).sum()
        assert meter.live_bytes > 0
        del loss
        assert meter.live_bytes == 0, "without a backward pass"
        loss = model(x).sum()
        kept = meter.live_bytes
        loss.backward(retain_graph=True)
        assert meter.live_bytes > kept, "what was brought back serves the next backward pass"
        loss.backward()
        assert meter.live_bytes == 0


def test_a_meter_counts_a_storage_once_and_neither_parameters_nor_buffers_nor_the_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.BatchNorm1d(6))
    x = torch.randn(5, 4)
    meter = ActivationMeter(model)
    with meter.watching(x):
        hidden = model[:2](x)
        assert meter.live_bytes == 5 * 6 * 4, "the sigmoid's output, kept by one module"
        outputs = model[2](hidden)
        statistics = 2 * 6 * 4
        assert meter.live_bytes == 5 * 6 * 4 + statistics, "and by two; and the batch's mean and deviation"
        loss = (outputs[:1] * outputs[1:2]).sum()
        assert meter.live_bytes == 2 * 5 * 6 * 4 + statistics, "parts of a tensor hold all of it"
        loss.backward()
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 2 * 5 * 6 * 4 + statistics
    meter.reset()
    assert meter.peak_bytes == 0
    with meter.watching(x):
        hidden = model[:2](x)
        loss = hidden.sum()
        del hidden, loss
        assert meter.live_bytes == 0, "without a backward pass"


def test_a_meter_watches_the_first_step_and_one_in_so_many() -> None:
    meter = ActivationMeter(nn.Linear(1, 1), every_steps=4)
    watched = []
    for step in range(6, 16):
        with meter.step(step) as is_on:
            watched += [step] if is_on else []
            assert (meter.track(torch.ones(3)) is None) is not is_on
    assert watched == [6, 9, 13]
    with pytest.raises(ValueError, match="every_steps"):
        ActivationMeter(nn.Linear(1, 1), every_steps=0)


def test_a_watched_step_still_notices_what_was_changed_in_place() -> None:
    meter = ActivationMeter(nn.Linear(1, 1))
    with meter.watching():
        x = torch.ones(3, requires_grad=True) * 2
        y = x.square()
        x += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# -- what can go wrong -----------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_an_input_changed_in_place_is_told_and_an_activation_in_place_works() -> None:
    x = torch.randn(SAMPLES, WIDTH)
    broken = nn.Sequential(*(nn.Sequential(part, nn.Linear(WIDTH, WIDTH)) for part in (nn.Tanh(), InPlace())))
    recompute(broken, "blocks")
    with pytest.raises(TrainingError, match=r"input of module '1' \(Sequential\).*changed in place"):
        broken(x).sum().backward()
    layers: list[nn.Module] = [nn.ELU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ELU(inplace=True)]
    plain = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    model = copy.deepcopy(plain)
    recompute(model, "sqrt", num_live=2)
    gradients = []
    for one in (plain, model):
        start = x.clone().requires_grad_()
        one(start * 1).sum().backward()
        assert start.grad is not None
        gradients.append(start.grad)
    assert torch.equal(*gradients)
    assert_same(everything(model), everything(plain))


class Changing(nn.Module):
    """A module that does something else every time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.linear(x)
        return x[: -self.calls].exp()


@pytest.mark.parametrize("num_samples", [SAMPLES])
def test_a_module_that_does_something_else_the_second_time_is_told(num_samples: int) -> None:
    model = nn.Sequential(*(nn.Sequential(Changing(), Changing()) for _ in range(2)))
    recompute(model, "blocks")
    with pytest.raises(TrainingError, match="did something else when computed again"):
        model(torch.randn(num_samples, WIDTH)).sum().backward()


def test_gradients_of_gradients_are_refused() -> None:
    model = mlp(9)
    recompute(model, "sqrt")
    with pytest.raises(TrainingError, match="gradients of gradients"):
        torch.autograd.grad(model(torch.randn(SAMPLES, WIDTH)).sum(), list(model.parameters()), create_graph=True)


class Losing(nn.Module):
    """A module that loses its peer in the second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise PeerLostError("gone")
        return self.linear(x)


def test_a_lost_peer_surfaces_from_the_second_pass_and_leaves_nothing_behind() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = nn.Sequential(nn.Sequential(norm, Losing(), nn.Linear(WIDTH, WIDTH)), plain)
    mean = norm.running_mean
    draw = RngKey(step=1)
    recompute(model, "blocks", draw=draw)
    loss = model(torch.randn(SAMPLES, WIDTH)).sum()
    draw.step = 2
    state = torch.get_rng_state()
    with pytest.raises(PeerLostError, match="gone"):
        loss.backward()
    assert norm.running_mean is mean
    assert norm.num_batches_tracked == 1
    assert draw.step == 2
    assert torch.equal(torch.get_rng_state(), state)


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) if x.sum() > 0 else x


def test_a_model_that_is_no_chain_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"train\.recompute: sqrt needs .*test_memory_held\.py, line \d+"):
        recompute(DataDependent(), "sqrt")
    with pytest.raises(ConfigError, match="must be one of none, blocks, sqrt, got 'all'"):
        recompute(mlp(), "all")
    assert recompute(DataDependent(), "none").parts == []


# -- what is where -------------------------------------------------------------------------------------------------


def test_blocks_are_the_items_of_sequences_and_lists_that_hold_layers_with_parameters() -> None:
    assert find_blocks(transformer()) == ["1", "2", "3", "4"]
    assert find_blocks(convolutions()) == ["1", "2", "3", "4"]
    assert find_blocks(encoder()) == ["1.layers.0", "1.layers.1", "1.layers.2"]
    assert find_blocks(mlp()) == []


def test_a_unit_begins_with_parameters_and_groups_are_about_the_square_root() -> None:
    assert units_of([False, True, False, True, False, False]) == [(0, 3), (3, 6)]
    assert units_of([False] * 3) == [(0, 1), (1, 2), (2, 3)]
    assert units_of([]) == []
    units = [(2 * index, 2 * index + 2) for index in range(64)]
    assert group(units) == [(16 * index, 16 * index + 16) for index in range(8)]
    assert len(group(units, num_live=4)) == 4
    assert group(units[:1]) == [(0, 2)]
    assert group([]) == []
    assert len(Chain([nn.Linear(1, 1)] * 9).groups) == 3
