"""A leaf's own parameters: those of the shards with what it has not passed on, whatever else comes from there."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.protocol.requests import Part
from orchestray.trainers.ps.variants.hierarchy.leaf_client import Collected
from orchestray.trainers.ps.variants.hierarchy.leaf_copies import LocalCopy
from support.central import Plan
from support.leaves import Tree


def copies(tree: Tree) -> list[LocalCopy]:
    found = [leaf.copy for leaf in tree.leaves]
    assert all(isinstance(copy, LocalCopy) for copy in found)
    return found  # type: ignore[return-value]


def share(number: int, gradient: Tensor, buffers: BufferPush | None = None) -> Collected:
    return Collected(number, (number,), (0.0,), (Part(1, number, 6, 12),), 0, gradient, frozenset(), buffers)


def test_what_others_pass_on_is_added_to_what_a_leaf_keeps_back_and_each_update_counts_once() -> None:
    tree = Tree(Plan(lr=1.0, shards=2, optimizer={"type": "sgd"}), 2, significance=0.5)
    one, other = copies(tree)
    before = one.shard.values.clone()
    small, large = torch.full_like(before, 1e-5), torch.full_like(before, 10.0)
    assert one.apply(share(0, small.clone())).taken
    one.send()
    assert one.residual.owes
    assert other.apply(share(1, large.clone())).taken
    other.send()
    assert not other.residual.owes
    one.fetch()
    assert torch.allclose(one.shard.values, before - small - large, rtol=0, atol=1e-12)
    one.send(everything=True)
    assert one.shard.version == 2, "its own push, and that of the other"
    other.fetch()
    for copy in (one, other):
        assert torch.allclose(copy.shard.values, before - small - large, rtol=0, atol=1e-12)
    assert torch.equal(tree.values(), other.shard.values)
    tree.close()


def test_a_push_that_is_sent_again_and_a_second_message_change_the_buffers_no_second_time() -> None:
    tree = Tree(Plan(batch_norm=True), 1)
    (copy,) = copies(tree)
    held = tree.machines[0].shard.buffers
    assert held is not None
    before = held.floats.clone()
    change = BufferPush(torch.ones_like(held.floats), torch.zeros_like(held.integers))
    for _ in range(2):
        copy.apply(share(0, torch.zeros_like(copy.shard.values), change))
    for _ in range(2):
        copy.send()
    assert torch.equal(held.floats, before + 1.0)
    tree.close()
