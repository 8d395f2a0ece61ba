"""The decorator `batch`: calls share batches, each instance has its own, and one that fails fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.serving import batch
from support.batching import in_virtual_time, now_s


class Doubling:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.most = self.running = 0

    @batch(max_batch_size=4, batch_wait_timeout_s=0.5, max_concurrent_batches=2)
    async def double(self, items: Sequence[Any]) -> list[Any]:
        self.sizes.append(len(items))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(1.0)
        self.running -= 1
        return [2 * item for item in items]


@in_virtual_time
async def test_calls_share_batches_of_the_size_wait_and_number_that_are_named() -> None:
    model = Doubling()
    assert await asyncio.gather(*map(model.double, range(10))) == [2 * number for number in range(10)]
    assert (sorted(model.sizes), model.most) == ([2, 4, 4], 2)
    began_s = now_s()
    assert await model.double(3) == 6
    assert now_s() - began_s == pytest.approx(1.5)


@in_virtual_time
async def test_each_instance_has_batches_of_its_own() -> None:
    first, second = Doubling(), Doubling()
    await asyncio.gather(first.double(1), second.double(2))
    assert (first.sizes, second.sizes) == ([1], [1])


@in_virtual_time
async def test_a_function_is_batched_too_and_an_item_that_makes_it_raise_fails_alone() -> None:
    sizes = []

    @batch
    async def invert(items: Sequence[float]) -> list[float]:
        sizes.append(len(items))
        return [1 / item for item in items]

    found = await asyncio.gather(*map(invert, (1, 2, 0, 4)), return_exceptions=True)
    assert [one for one in found if not isinstance(one, Exception)] == [1, 0.5, 0.25]
    assert "ZeroDivisionError" in repr(found[2].__cause__)  # type: ignore[union-attr]
    assert sizes[0] == 4


def test_a_function_that_is_not_async_is_refused() -> None:
    with pytest.raises(TypeError, match="square must be an async function that takes a list of items"):

        @batch
        def square(items: list[int]) -> list[int]:
            return [item**2 for item in items]


@pytest.mark.parametrize("name", ["max_batch_size", "max_concurrent_batches"])
@pytest.mark.parametrize("number", [0, -1])
def test_a_number_that_takes_nothing_is_refused_before_any_call(name: str, number: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be >= 1, got {number}"):

        @batch(**{name: number})
        async def double(items: Sequence[int]) -> list[int]:
            return [2 * item for item in items]


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_wait_that_is_no_time_is_refused_before_any_call(seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"batch_wait_timeout_s: must be >= 0 and finite, or None, got {seconds}"):

        @batch(batch_wait_timeout_s=seconds)
        async def double(items: Sequence[int]) -> list[int]:
            return [2 * item for item in items]


class Twice(Doubling):
    @batch(max_batch_size=4)
    async def double(self, items: Sequence[Any]) -> list[Any]:
        return [2 * item for item in await asyncio.gather(*map(super().double, items))]


@in_virtual_time
async def test_a_batched_method_may_call_the_batched_method_that_it_overrides() -> None:
    model = Twice()
    assert await asyncio.wait_for(asyncio.gather(*map(model.double, range(4))), 60) == [0, 4, 8, 12]
    assert model.sizes == [4]
