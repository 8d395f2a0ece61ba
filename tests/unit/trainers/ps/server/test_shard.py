"""A shard: what pushes become, whatever order they come in and however often."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.trainers.optim.clipping import clip
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.protocol.json_state import from_json, to_json
from orchestray.trainers.ps.protocol.partition import Partition
from orchestray.trainers.ps.protocol.requests import Part
from orchestray.trainers.ps.server.batches import SeenShares
from orchestray.trainers.ps.server.shard import Origin, Rates, Shard

PARTITION = Partition((("a", (3, 2)), ("b", (5,))))
SHARES = 4


def make_shard(consistency: Any = "synchronous", optimizer: str = "adam", **rest: Any) -> Shard:
    values = torch.arange(11, dtype=torch.float64) / 7
    return Shard(PARTITION.slices(0), values, make_optimizer(optimizer), Rates(0.1), consistency=consistency, **rest)


def origin(step: int, share: int, *, read_version: int = 0, worker: int = 0) -> Origin:
    return Origin(worker, (Part(step, share, 2, 2 * SHARES),), read_version)


def gradient(step: int, share: int) -> Tensor:
    return torch.randn(11, generator=torch.Generator().manual_seed(100 * step + share), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_is_the_same_update_bit_for_bit_in_whatever_order_its_shares_come(seed: int) -> None:
    wanted, found = make_shard(), make_shard()
    arrivals = [(step, share) for step in (1, 2, 3) for share in range(SHARES)]
    order = torch.randperm(len(arrivals), generator=torch.Generator().manual_seed(seed)).tolist()
    for shard, sequence in ((wanted, arrivals), (found, [arrivals[index] for index in order])):
        for step, share in sequence:
            shard.push(origin(step, share), gradient(step, share))
        shard.advance(3)
        assert shard.version == 3
    assert torch.equal(found.values, wanted.values)


def test_a_batch_waits_until_it_is_known_to_be_complete_everywhere() -> None:
    shard = make_shard()
    before = shard.values.clone()
    for share in range(SHARES):
        shard.push(origin(1, share), gradient(1, share))
    assert (shard.version, torch.equal(shard.values, before)) == (0, True)
    assert shard.needs(1)
    assert shard.advance(1)
    assert shard.version == 1


def test_an_incomplete_batch_is_no_update() -> None:
    shard = make_shard()
    shard.push(origin(1, 0), gradient(1, 0))
    assert not shard.advance(1)
    assert shard.version == 0


@pytest.mark.parametrize("consistency", ["synchronous", "asynchronous"])
def test_a_share_is_applied_once_whoever_pushes_it_and_whenever(consistency: str) -> None:
    once, often = make_shard(consistency), make_shard(consistency)
    for step in (1, 2, 3):
        for share in range(SHARES):
            once.push(origin(step, share), gradient(step, share))
            assert often.push(origin(step, share), gradient(step, share)).taken
            for worker in (0, 1):
                assert not often.push(origin(step, share, worker=worker), gradient(9, 9)).taken
        once.advance(step)
        often.advance(step)
    assert not often.push(origin(1, 2), gradient(9, 9)).taken
    assert torch.equal(once.values, often.values)


@pytest.mark.parametrize("consistency", ["synchronous", "stale", "asynchronous"])
def test_a_copy_made_at_any_moment_goes_on_the_same(consistency: str) -> None:
    pushes = [(step, share) for step in (1, 2, 3) for share in (2, 0, 3, 1)]
    for cut in range(len(pushes) + 1):
        shard = make_shard(consistency)
        for step, share in pushes[:cut]:
            shard.push(origin(step, share), gradient(step, share))
            shard.advance(step - 1)
        state, tensors = shard.state()
        copy = make_shard(consistency)
        copy.load_state(json.loads(json.dumps(state)), {name: tensor.clone() for name, tensor in tensors.items()})
        for each in (shard, copy):
            for step, share in pushes[max(0, cut - 2) :]:
                each.push(origin(step, share), gradient(step, share))
            each.advance(3)
        assert shard.version == copy.version
        assert torch.equal(shard.values, copy.values)


def test_staleness_is_the_updates_between_read_and_write() -> None:
    shard = make_shard("asynchronous", "sgd")
    found = [shard.push(origin(1, share, read_version=0), gradient(1, share)).staleness for share in range(SHARES)]
    assert found == [0, 1, 2, 3]
    late = make_shard("stale", "sgd", version=4)
    assert late.push(origin(5, 0, read_version=2), gradient(5, 0)).staleness == 2


def test_a_late_push_moves_the_weights_by_its_part() -> None:
    shard = make_shard("asynchronous", "sgd", scale_by_staleness=True)
    before = shard.values.clone()
    for share in range(3):
        shard.push(origin(1, share), torch.ones(11, dtype=torch.float64))
    moved = 0.1 * (1 + 1 / 2 + 1 / 3)
    assert torch.allclose(before - shard.values, torch.full_like(before, moved), rtol=0, atol=1e-12)
    late = make_shard("stale", "sgd", scale_by_staleness=True, version=4)
    before = late.values.clone()
    for share in range(SHARES):
        late.push(origin(5, share, read_version=4 - share), torch.ones(11, dtype=torch.float64))
    late.advance(5)
    moved = 0.1 * (1 + 1 / 2 + 1 / 3 + 1 / 4)
    assert torch.allclose(before - late.values, torch.full_like(before, moved), rtol=0, atol=1e-12)


def test_values_that_are_lent_stay_as_they_are_whatever_updates_come() -> None:
    alone, shard = make_shard("asynchronous"), make_shard("asynchronous")
    lent = []
    for share in range(SHARES):
        for each in (alone, shard):
            each.push(origin(1, share), gradient(1, share))
        lent.append((shard.lend(), shard.values.clone()))
        if share == 1:
            shard.give_back(lent.pop(0)[0])
    assert all(torch.equal(values, then) for values, then in lent)
    assert torch.equal(shard.values, alone.values)
    for values, _ in lent:
        shard.give_back(values)
    memory = shard.values.data_ptr()
    shard.push(origin(2, 0), gradient(2, 0))
    assert shard.values.data_ptr() == memory


def test_a_batch_is_clipped_as_one_gradient_and_a_share_to_its_part() -> None:
    total = torch.stack([gradient(1, share) for share in range(SHARES)]).sum(0)
    norm = float(total.norm())
    shard = make_shard("synchronous", "sgd", grad_clip=norm / 3)
    before = shard.values.clone()
    for share in range(SHARES):
        shard.push(origin(1, share), gradient(1, share))
    shard.advance(1)
    clip([total], norm / 3)
    assert torch.allclose(before - shard.values, 0.1 * total, rtol=0, atol=1e-12)
    alone = make_shard("asynchronous", "sgd", grad_clip=1.0)
    before = alone.values.clone()
    alone.push(origin(1, 0), 50 * gradient(1, 0))
    assert float((before - alone.values).norm()) == pytest.approx(0.1 / SHARES, rel=1e-6)


def test_a_parameter_that_no_share_used_keeps_its_value_and_its_state() -> None:
    shard = make_shard("synchronous", "adam")
    before = shard.values.clone()
    for share in range(SHARES):
        shard.push(origin(1, share), gradient(1, share), unused=["b"] if share else ["a", "b"])
    shard.advance(1)
    assert torch.equal(shard.values[6:], before[6:])
    assert not torch.equal(shard.values[:6], before[:6])
    assert shard.optimizer_slots()["b:0.step"] == 0


def test_shares_that_were_sent_together_are_taken_together_or_told_apart() -> None:
    shard = make_shard("asynchronous", "sgd")
    shard.push(origin(1, 1), gradient(1, 1))
    before = shard.values.clone()
    parts = tuple(Part(1, share, 2, 8) for share in range(3))
    done = shard.push(Origin(0, parts, 0), gradient(2, 0))
    assert (done.taken, done.missing) == (False, (parts[0], parts[2]))
    assert torch.equal(shard.values, before)


def test_norms_of_cut_parameters_are_refused() -> None:
    partition = Partition(PARTITION.parameters, 3)
    with pytest.raises(ConfigError, match=r"lars looks at whole parameters.*shards: 1"):
        Shard(partition.slices(0), torch.zeros(4), make_optimizer("lars"), Rates(0.1))


def test_what_is_remembered_of_applied_shares_does_not_grow_with_the_run() -> None:
    applied = SeenShares()
    most = 0
    for step in range(1, 500):
        for share in range(SHARES):
            # The last share of each batch comes three batches late.
            part = Part(step if share < 3 else step - 3, share, 2, 8)
            if part.step > 0:
                assert part not in applied
                applied.add(part)
                assert part in applied
        most = max(most, applied.num_remembered)
    assert most <= 4 * SHARES
    again = from_json(SeenShares, json.loads(json.dumps(to_json(applied))))
    assert Part(497, 3, 2, 8) not in again
    assert Part(497, 2, 2, 8) in again
    assert Part(12, 3, 2, 8) in again
