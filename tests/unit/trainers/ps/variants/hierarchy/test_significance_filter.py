"""Changes that cross between groups, and those that stay."""

from __future__ import annotations

import pytest
import torch

from orchestray.trainers.ps.variants.hierarchy.significance_filter import FLOOR, Residual, pack, threshold, unpack


def steps(seed: int, num: int = 40) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(500, generator=generator, dtype=torch.float64)
    values[::7] = 0.0
    changes = [torch.randn(500, generator=generator, dtype=torch.float64) * 0.02 for _ in range(num)]
    return values, changes


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("significance", [0.01, 0.1, 1.0])
def test_what_stays_never_exceeds_the_threshold(seed: int, significance: float) -> None:
    values, changes = steps(seed)
    residual, kept_any = Residual(values, significance), False
    for change in changes:
        values = values + change
        residual.add(change)
        residual.take(values)
        assert bool((residual.pending.abs() < threshold(values, significance)).all())
        kept_any = kept_any or residual.owes
    assert kept_any


@pytest.mark.parametrize("seed", range(5))
def test_what_stays_never_exceeds_a_threshold_that_falls_with_the_root_of_the_updates(seed: int) -> None:
    values, changes = steps(seed)
    falling, constant = Residual(values, 0.3, falls=True), Residual(values, 0.3)
    for number, change in enumerate(changes, 1):
        values = values + change
        for residual in (falling, constant):
            residual.add(change)
            residual.take(values, num_updates=number)
        assert bool((falling.pending.abs() < threshold(values, 0.3 / number**0.5)).all())
    assert float(falling.pending.norm()) < float(constant.pending.norm())


@pytest.mark.parametrize("seed", range(5))
def test_what_was_sent_and_what_stays_are_the_sum_of_the_changes(seed: int) -> None:
    values, changes = steps(seed)
    residual, sent = Residual(values, 0.1), torch.zeros_like(values)
    for change in changes:
        values = values + change
        residual.add(change)
        places, taken = residual.take(values)
        sent[places] += taken
    total = torch.stack(changes).sum(0)
    assert float((sent + residual.pending - total).abs().max()) <= 1e-12
    kept = residual.pending.count_nonzero()
    places, taken = residual.take(values, everything=True)
    assert len(places) == kept < len(values), "what has not changed is not sent"
    sent[places] += taken
    assert not residual.owes
    assert float((sent - total).abs().max()) <= 1e-12


def test_only_significant_elements_are_taken_and_each_whole() -> None:
    values = torch.tensor([1.0, 1.0, 0.0, 0.0, -2.0], dtype=torch.float64)
    residual = Residual(values, 0.1)
    residual.add(torch.tensor([0.1, 0.09, 0.1 * FLOOR, 0.05 * FLOOR, -0.3], dtype=torch.float64))
    places, change = residual.take(values)
    assert places.tolist() == [0, 2, 4]
    assert change.tolist() == [0.1, 0.1 * FLOOR, -0.3]
    assert residual.pending.tolist() == [0.0, 0.09, 0.0, 0.05 * FLOOR, 0.0]


def test_without_a_threshold_every_change_is_significant() -> None:
    values, changes = steps(0)
    residual = Residual(values, 0.0)
    residual.add(changes[0])
    residual.take(values)
    assert not residual.owes


@pytest.mark.parametrize("num_chosen", [0, 1, 100, 333, 334, 400, 500])
def test_a_change_is_packed_into_the_fewer_bytes_and_comes_out_the_same(num_chosen: int) -> None:
    change = torch.randn(500, dtype=torch.float64)
    places = torch.randperm(500)[:num_chosen].sort().values
    tensors = pack(places, change[places], 500)
    assert sum(tensor.nbytes for tensor in tensors) == min(num_chosen * 12, 500 * 8)
    found_places, found = unpack(tensors)
    whole = torch.zeros(500, dtype=torch.float64)
    if found_places is None:
        whole += found
    else:
        whole[found_places] = found
    wanted = torch.zeros(500, dtype=torch.float64)
    wanted[places] = change[places]
    assert torch.equal(whole, wanted)


def test_a_threshold_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Residual(torch.zeros(3), -0.1)
    with pytest.raises(ValueError, match="floor positive"):
        Residual(torch.zeros(3), 0.1, floor=0.0)
