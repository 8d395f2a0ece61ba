"""A model's buffers as a server keeps them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.ps.protocol.buffers import BufferPlaces, Buffers, SharedBuffers


class Replaces(nn.Module):
    """A module that replaces its buffer by another tensor."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        self.total = self.total + inputs.sum(0)
        return inputs


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Replaces(), nn.BatchNorm1d(3))


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))


def state(net: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


def test_buffers_found_once_are_those_of_the_model_also_after_one_was_replaced() -> None:
    net, plain = model(), model()
    places = BufferPlaces(net)
    for inputs in torch.randn(3, 5, 3):
        net(inputs)
        plain(inputs)
        found, wanted = Buffers.of(places), Buffers.of(plain)
        assert all(torch.equal(state(net)[name], value) for name, value in state(plain).items())
        assert torch.equal(found.floats, wanted.floats)
        assert torch.equal(found.integers, wanted.integers)


def test_what_is_written_through_places_is_in_the_model_and_a_copy_stays_as_it_was() -> None:
    net = model()
    places = BufferPlaces(net)
    before = Buffers.of(places)
    kept = before.floats.clone()
    net(torch.randn(5, 3))
    change = before.change_of(places, 0.5)
    assert torch.equal(before.floats, kept)
    assert torch.equal(change.floats, (Buffers.of(places).floats - kept) * 0.5)
    before.write_to(places)
    assert all(torch.equal(value, state(model())[name]) for name, value in state(net).items())


def test_buffers_of_several_kinds_and_tied_ones_count_once_each() -> None:
    net = model()
    net.register_buffer("wide", torch.ones(2, dtype=torch.float64))
    net.register_buffer("tied", net[1].running_mean)
    places = BufferPlaces(net)
    assert Buffers.of(places).floats.numel() == 2 + 3 + 12
    held = Buffers.of(places)
    held.floats += 1.0
    held.write_to(places)
    assert torch.equal(Buffers.of(places).floats, held.floats)
    assert net.get_buffer("tied") is net[1].running_mean


@pytest.mark.parametrize("make", [model, plain_model], ids=["one is replaced", "all stay in one"])
def test_shared_buffers_read_and_changed_where_they_lie_are_those_of_copies_bit_for_bit(
    make: Callable[[], nn.Module],
) -> None:
    net, plain = make(), make()
    places, other = BufferPlaces(net), BufferPlaces(plain)
    shared, wanted = Buffers.of(places), Buffers.of(other)
    ours = SharedBuffers(places, shared)
    for inputs in torch.randn(3, 5, 3):
        for held in (shared, wanted):  # what another worker has done
            held.floats += 0.3
        ours.read()
        before = wanted.copy()
        before.write_to(other)
        net(inputs)
        plain(inputs)
        ours.add(0.3)
        wanted.add(before.change_of(other, 0.3))
        assert torch.equal(shared.floats, wanted.floats)
        assert torch.equal(shared.integers, wanted.integers)
        assert all(torch.equal(state(net)[name], value) for name, value in state(plain).items())
