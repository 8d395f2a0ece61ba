"""Parameters cut into shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.ps.protocol.partition import ALIGNMENT, FlatModel, Partition, flatten_parameters, slice_views


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 23])
def test_every_element_is_in_one_shard_and_sizes_differ_by_at_most_one(num_shards: int) -> None:
    partition = Partition((("a", (3, 4)), ("b", ()), ("c", (10,))), num_shards)
    sizes = [stop - start for start, stop in partition.bounds]
    assert sum(sizes) == 23
    assert max(sizes) - min(sizes) <= 1
    owned = [
        (piece.name, element)
        for shard in range(num_shards)
        for piece in partition.slices(shard)
        for element in range(piece.start, piece.stop)
    ]
    assert owned == [("a", i) for i in range(12)] + [("b", 0)] + [("c", i) for i in range(10)]


@pytest.mark.parametrize("num_shards", [2, 3, 5, 16])
def test_large_parameters_are_cut_at_their_ends_or_in_whole_blocks(num_shards: int) -> None:
    partition = Partition((("a", (300, 7)), ("b", (9,)), ("c", (1000,)), ("d", (33, 50))), num_shards)
    starts = {"a": 0, "b": 2100, "c": 2109, "d": 3109}
    cuts = [stop for _, stop in partition.bounds[:-1]]
    for cut in cuts:
        assert any(cut == start or (cut > start and (cut - start) % ALIGNMENT == 0) for start in starts.values())
    ideal = [round(4759 * (shard + 1) / num_shards) for shard in range(num_shards - 1)]
    assert max(abs(cut - wanted) for cut, wanted in zip(cuts, ideal, strict=True)) <= ALIGNMENT
    assert partition.bounds[0][0] == 0
    assert partition.bounds[-1][1] == 4759


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_whole_parameters_are_shared_as_evenly_as_their_sizes_allow(num_shards: int) -> None:
    parameters = (("a", (30, 7)), ("b", (9,)), ("c", (100,)), ("d", (3, 50)), ("e", ()))
    partition = Partition(parameters, num_shards, unit="parameter")
    slices = [partition.slices(shard) for shard in range(num_shards)]
    assert [(piece.name, piece.shape) for held in slices for piece in held] == list(parameters)
    assert all(held and all(piece.is_whole for piece in held) for held in slices)
    assert max(stop - start for start, stop in partition.bounds) == {1: 470, 2: 251, 3: 210, 5: 210}[num_shards]


def test_more_shards_than_elements_are_refused_with_how_many_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"strategy.exchange.shards: 4 shards cannot share 3 parameters; use at most 3"
    ):
        Partition((("a", (3,)),), 4)
    with pytest.raises(ConfigError, match="3 shards cannot share 2 parameters, which the optimizer has to see whole"):
        Partition((("a", (3,)), ("b", (4, 4))), 3, unit="parameter")


def test_a_flat_model_computes_what_the_model_computed_and_is_written_through_its_flat_tensor() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    inputs = torch.randn(5, 3)
    before = model(inputs)
    flat = flatten_parameters(model)
    assert torch.equal(model(inputs), before)
    assert torch.equal(flat, torch.cat([p.reshape(-1) for p in model.parameters()]))
    flat.zero_()
    assert all(not p.any() for p in model.parameters())


def test_tied_parameters_stay_tied_and_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    flat = FlatModel(model)
    assert flat.values.numel() == Partition.of(model).num_elements == 9
    flat.begin()
    model(torch.eye(3)).sum().backward()
    assert model[1].weight is model[0].weight
    assert torch.equal(flat.gradient.view(3, 3), model[0].weight.grad)
    assert torch.equal(flat.gradients[0], flat.gradient)
    assert flat.gradient.any()


def test_gradients_gather_in_the_flat_gradient_and_unused_parameters_are_named() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "not": nn.Linear(2, 1)})
    flat = FlatModel(model)
    for _ in range(2):
        flat.begin()
        model["used"](torch.ones(4, 2)).sum().backward()
        assert flat.unused() == ["not.weight", "not.bias"]
        assert flat.gradient.tolist() == [4, 4, 4, 0, 0, 0]
        model["used"](torch.ones(4, 2)).sum().backward()
        assert flat.gradient.tolist() == [8, 8, 8, 0, 0, 0]
        assert [gradient.tolist() for gradient in flat.gradients] == [[8, 8], [8], [0, 0], [0]]


def test_frozen_parameters_stay_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    assert [name for name, _ in Partition.of(model).parameters] == ["1.weight", "1.bias"]


def test_parameters_of_two_kinds_are_refused_by_name() -> None:
    with pytest.raises(TrainingError, match=r"'0.weight' is torch.float32 on cpu, '1.weight' is torch.float64"):
        flatten_parameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))


def test_a_slice_that_is_whole_has_the_shape_of_its_parameter() -> None:
    partition = Partition((("a", (2, 3)), ("b", (4, 2))), 2)
    views = slice_views(partition.slices(0), torch.arange(7.0))
    assert [view.shape for view in views] == [(2, 3), (1,)]
