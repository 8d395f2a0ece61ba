"""n-softsync: an update of every few pushes, from any workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from orchestray.trainers.core.parts import reports_of
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.protocol.partition import Partition
from orchestray.trainers.ps.protocol.requests import Part
from orchestray.trainers.ps.protocol.settings import CentralSettings
from orchestray.trainers.ps.server.shard import Applied, Origin, Rates, Shard
from support.central_run import central_settings

SIZE = 11


def gradient(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_shard(pushes_per_update: int) -> Shard:
    partition = Partition((("a", (3, 2)), ("b", (5,))))
    values, optimizer = torch.zeros(SIZE, dtype=torch.float64), make_optimizer("adam")
    return Shard(partition.slices(0), values, optimizer, Rates(0.1), pushes_per_update=pushes_per_update)


def push(shard: Shard, seed: int) -> Applied:
    return shard.push(Origin(seed, (Part(1 + seed, 0, 2, 8),), 0), gradient(seed))


def test_every_few_pushes_are_one_update_of_their_sum() -> None:
    shard, wanted = make_shard(3), make_shard(1)
    versions = [push(shard, seed).version for seed in range(7)]
    assert versions == [0, 0, 1, 1, 1, 2, 2]
    assert reports_of(shard)["Softsync"] == [{"updates": 2, "pushes": 6, "scaled": 0}]
    for first in (0, 3):
        total = sum((gradient(seed) for seed in range(first, first + 3)), torch.zeros(()))
        wanted.push(Origin(0, (Part(1 + first, 0, 2, 8),), 0), total)
    torch.testing.assert_close(shard.values, wanted.values, rtol=0, atol=1e-12)
    assert not push(shard, 6).taken  # what waits for an update counts once, too


def test_a_copy_of_the_shard_goes_on_with_what_has_been_gathered() -> None:
    first, second = make_shard(3), make_shard(3)
    for seed in range(5):
        push(first, seed)
    state, tensors = first.state()
    second.load_state(state, {name: tensor.clone() for name, tensor in tensors.items()})
    for shard in (first, second):
        for seed in range(5, 9):
            push(shard, seed)
    assert first.version == second.version == 3
    assert torch.equal(first.values, second.values)


@pytest.mark.parametrize(("n", "num_pushes"), [(1, 4), (2, 2), (4, 1)])
def test_an_update_is_of_as_many_pushes_as_workers_over_n(n: int, num_pushes: int) -> None:
    settings = central_settings(4, {"consistency": "asynchronous", "softsync": n})
    assert CentralSettings.of(settings).pushes_per_update(settings) == num_pushes
