"""A cache of a server's weights: its bound holds, and the weights are those of training with all of them at hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestray.trainers.survey.lab.caching import ParameterCache, parameter_cache

NUMBER_BYTES = 4


def server(*sizes: int) -> dict[str, torch.Tensor]:
    named = zip("abcd", sizes, strict=False)
    return {name: torch.full((size,), float(index)) for index, (name, size) in enumerate(named)}


def test_weights_are_those_of_torch_and_the_memory_stays_below_its_bound_whatever_it_is() -> None:
    exhibit = parameter_cache()
    rows: list[Any] = list(exhibit.rows)
    assert [row[0] for row in rows] == ["largest layer", "half", "nine tenths", "all"]
    for row_name, bound, peak, blocks, _, apart in rows:
        assert peak <= bound
        assert (peak == bound) == (row_name in {"largest layer", "all"})  # those bounds are reached
        assert peak > 0.75 * bound
        assert apart < 1e-12
        assert blocks > 0
    fetched = [row[4] for row in rows]
    assert fetched == sorted(fetched, reverse=True)
    assert fetched[-1] * 8 == 1  # eight steps
    assert exhibit.findings[0].startswith("With 47% of the memory the weights are the same; 1.5 models are fetched")


def test_the_block_used_longest_ago_is_dropped_and_a_pinned_one_never() -> None:
    cache = ParameterCache(server(2, 2, 2, 2), 6 * NUMBER_BYTES)
    for name in "abca":
        with cache.pinned(name):
            pass
    with cache.pinned("d"):  # b is dropped
        assert cache.held_bytes == cache.peak_bytes == 6 * NUMBER_BYTES
    assert cache.num_fetched == 4
    with cache.pinned("a"), cache.pinned("c"):
        assert cache.num_fetched == 4
    with cache.pinned("b"):
        assert cache.num_fetched == 5
    assert cache.bytes_fetched == 5 * 2 * NUMBER_BYTES
    with cache.pinned("b"):  # it becomes the one used longest ago, and stays
        for name in "acd":
            with cache.pinned(name):
                pass
        fetched = cache.num_fetched
    with cache.pinned("b"):
        assert cache.num_fetched == fetched


def test_an_update_reaches_the_server_and_the_block_that_is_held() -> None:
    whole = server(2, 3)
    cache = ParameterCache(whole, 5 * NUMBER_BYTES)
    with cache.pinned("a") as (held,):
        cache.update("a", torch.ones(2))
        cache.update("b", torch.ones(3))
        assert held.tolist() == whole["a"].tolist() == [1.0, 1.0]
    with cache.pinned("b") as (fetched,):
        assert fetched.tolist() == [2.0] * 3


def test_blocks_that_do_not_fit_together_are_refused() -> None:
    cache = ParameterCache(server(2, 3), 4 * NUMBER_BYTES)
    with pytest.raises(ValueError, match="a, b take 20 bytes, and the cache has 16"), cache.pinned("a", "b"):
        pass
