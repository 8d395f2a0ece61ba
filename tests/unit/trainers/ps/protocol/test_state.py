"""The state of an optimizer on servers, cut for shards and joined again."""

from __future__ import annotations

import torch
from torch import nn

from orchestray.trainers.optim.soap import SOAP
from orchestray.trainers.ps.protocol.partition import Partition, slice_views
from orchestray.trainers.ps.protocol.state import slots_of_shard, whole_slots
from support.training import same_bits


def test_slots_that_have_another_shape_than_their_parameter_keep_it() -> None:
    model = nn.Linear(4, 3)
    partition = Partition.of(model)
    slices = partition.slices(0)
    views = slice_views(slices, torch.arange(15.0))
    optimizer = SOAP()
    optimizer.init([(f"{piece.name}:{piece.start}", view) for piece, view in zip(slices, views, strict=True)])
    optimizer.step(views, [torch.ones(3, 4), torch.ones(3)], 0.1)
    state = optimizer.state_tensors()
    joined = whole_slots(partition, [{f"optimizer/{key}": tensor for key, tensor in state.items()}])
    assert joined["weight.left"].shape == (3, 3)
    assert joined["weight.right_basis"].shape == (4, 4)
    assert same_bits(slots_of_shard(slices, joined), state)
