"""The decorator `batch`: calls share batches, each instance has its own, and one that fails fails alone."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.serving import batch
from orchestray.serving.batching import BatchFunctionError
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


async def _starred(*items: list[int]) -> list[int]:
    return [*items[0]]


async def _by_name_alone(items: list[int], *, by: list[int]) -> list[int]:
    return [*items, *by]


async def _of_nothing() -> list[int]:
    return []


@pytest.mark.parametrize("function", [_starred, _by_name_alone, _of_nothing])
def test_a_function_whose_lists_could_not_be_told_apart_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="must be an async function that takes a list of items, or several"):
        batch(function)


@in_virtual_time
async def test_with_a_wait_of_0_a_batch_is_of_what_waits_already() -> None:
    sizes: list[int] = []

    @batch(batch_wait_timeout_s=0, max_batch_size=4)
    async def double(items: Sequence[int]) -> list[int]:
        sizes.append(len(items))
        await asyncio.sleep(1.0)
        return [2 * item for item in items]

    began_s = asyncio.get_running_loop().time()
    assert await asyncio.gather(*map(double, range(4))) == [0, 2, 4, 6]
    assert asyncio.get_running_loop().time() - began_s <= 2.0
    assert sum(sizes) == 4


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


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @batch
    async def line(self, items: list[int], offsets: list[int]) -> list[int]:
        return [self.factor * item + offset for item, offset in zip(items, offsets, strict=True)]

    @classmethod
    @batch
    async def named(cls, items: list[int]) -> list[tuple[str, int]]:
        return [(cls.__name__, item) for item in items]

    @staticmethod
    @batch
    async def same(items: list[int]) -> list[int]:
        return items

    @staticmethod
    @batch
    async def differences(items: list[int], by: list[int]) -> list[int]:
        return [item - each for item, each in zip(items, by, strict=True)]


class Other(Scaled):
    pass


@batch
async def less(items: list[int], by: list[int]) -> list[int]:
    return [item - each for item, each in zip(items, by, strict=True)]


@in_virtual_time
async def test_items_are_given_by_place_or_by_name_and_of_several_lists() -> None:
    model = Scaled(2)
    given = (model.line(1, 10), model.line(2, offsets=20), model.line(offsets=30, items=3), less(by=1, items=5))
    assert [*await asyncio.gather(*given)] == [12, 24, 36, 4]
    assert [*await asyncio.gather(Scaled.named(1), Other.named(items=2))] == [("Scaled", 1), ("Other", 2)]
    assert await Scaled.same(3) == 3
    with pytest.raises(TypeError, match="missing a required argument: 'offsets'"):
        await model.line(1)


@in_virtual_time
async def test_a_static_method_of_several_lists_has_no_owner() -> None:
    model = Scaled(2)
    given = (Scaled.differences(3, 1), model.differences(5, by=2), Other.differences(by=9, items=9))
    assert [*await asyncio.gather(*given)] == [2, 3, 0]
    with pytest.raises(TypeError, match="missing a required argument: 'by'"):
        await model.differences(1)


class Odd:
    factor = 3

    @batch
    async def times(this, items: list[int], by: int = 1) -> list[int]:  # noqa: N805 - its author calls it so
        return [this.factor * by * item for item in items]

    @classmethod
    @batch
    async def plain(kind, items: list[int]) -> list[int]:  # noqa: N804 - its author calls it so
        return [kind.factor * item for item in items]


async def _plus(self: Any, items: list[int]) -> list[int]:
    return [self.factor + item for item in items]


Odd.plus = batch(_plus)  # type: ignore[attr-defined]


def test_methods_are_known_by_the_class_around_them_or_by_the_name_of_their_first_parameter() -> None:
    model: Any = Odd()
    assert asyncio.run(model.times(2)) == 6
    assert asyncio.run(model.plus(2)) == 5
    assert (asyncio.run(model.plain(4)), asyncio.run(Odd.plain(4))) == (12, 12)


def test_parameters_with_defaults_are_no_lists_and_keep_their_defaults() -> None:
    @batch
    async def scaled(items: list[int], by: int = 2, *, plus: int = 1) -> list[int]:
        return [by * item + plus for item in items]

    assert asyncio.run(scaled(3)) == 7
    with pytest.raises(TypeError, match="too many positional arguments"):
        asyncio.run(scaled(3, 4))


def pickled(model: Scaled) -> Any:
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - of this test


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_an_instance_is_not_answered_by_the_instance(copied: Any) -> None:
    async def ask() -> tuple[int, int]:
        model = Scaled(2)
        await model.line(1, 0)
        other = copied(model)
        other.factor = 3
        return await model.line(1, 0), await other.line(1, 0)

    assert asyncio.run(ask()) == (2, 3)


def test_a_function_answers_in_one_event_loop_after_another() -> None:
    assert [asyncio.run(less(items, 1)) for items in (3, 5)] == [2, 4]


def test_event_loops_that_have_ended_are_let_go() -> None:
    async def ask() -> weakref.ref[Any]:
        await less(3, 1)
        return weakref.ref(asyncio.get_running_loop())

    first, second, _ = (asyncio.run(ask()) for _ in range(3))
    gc.collect()
    assert first() is None
    assert second() is None


def test_an_owner_that_takes_no_attributes_is_named() -> None:
    class Bare:
        __slots__ = ()

        @batch
        async def same(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match="must take attributes, got a Bare"):
        asyncio.run(Bare().same(1))


@pytest.mark.parametrize("answer", [{1: 10}, {10}, "a", b"a"])
def test_what_is_no_sequence_of_answers_is_none(answer: Any) -> None:
    @batch
    async def answered(items: list[int]) -> Any:
        return answer

    with pytest.raises(BatchFunctionError, match="must return a sequence"):
        asyncio.run(answered(1))
