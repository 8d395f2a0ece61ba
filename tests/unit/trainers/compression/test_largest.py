"""The largest values are found exactly, whether a sample helps or misleads."""

from __future__ import annotations

import pytest
import torch

from orchestray.trainers.compression import largest as module
from orchestray.trainers.compression.largest import largest


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def expected(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the largest values by a stable sort: of equal values the first."""
    return values.abs().sort(descending=True, stable=True).indices[:count].sort().values


@pytest.mark.parametrize("count", [0, 1, 7, 100, 999, 1000])
def test_the_largest_of_few_values_are_found(count: int) -> None:
    values = torch.randn(1000, generator=generator())
    assert torch.equal(largest(values, count, generator()), expected(values, count))


@pytest.mark.parametrize("count", [1, 300, 3000, 75_000, 299_999])
@pytest.mark.parametrize("kind", ["normal", "one large", "zeros", "few kinds", "growing"])
def test_the_largest_of_many_values_are_found_by_sample_or_without(kind: str, count: int) -> None:
    num = 300_000
    values = torch.randn(num, generator=generator())
    if kind == "one large":
        values[5] = 1e9
    elif kind == "zeros":
        values = torch.where(torch.rand(num, generator=generator()) < 1e-3, values, torch.zeros(()))
    elif kind == "few kinds":
        values = values.round()
    elif kind == "growing":
        values = torch.arange(num, dtype=torch.float32)
    for seed in range(2):
        assert torch.equal(largest(values, count, generator(seed)), expected(values, count))


@pytest.mark.parametrize("largest_first", [True, False])
def test_a_sample_that_misleads_changes_nothing(largest_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(100_000, generator=generator())
    drawn = []

    def drawn_from_an_end(sizes: torch.Tensor, num_drawn: int, _generator: torch.Generator) -> torch.Tensor:
        drawn.append(num_drawn)
        return sizes.topk(num_drawn, largest=largest_first).values

    monkeypatch.setattr(module, "sample_of", drawn_from_an_end)
    assert torch.equal(largest(values, 1000, generator()), expected(values, 1000))
    assert drawn


@pytest.mark.parametrize("num", [50, 100_000])
def test_what_is_not_a_number_counts_as_largest(num: int) -> None:
    values = torch.randn(num, generator=generator())
    values[[3, 9]] = torch.nan
    assert largest(values, 1, generator()).tolist() == [3]
    assert largest(values, 2, generator()).tolist() == [3, 9]
    assert {3, 9} < set(largest(values, 6, generator()).tolist())
