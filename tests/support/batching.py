"""A model with known times for a batcher, and tests in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from orchestray.platform.sim.event_loop import run

A_S, C_S = 0.020, 0.001


class Model:
    """A model that doubles numbers, in a + c b seconds, and keeps its inputs."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    async def __call__(self, items: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(items))
        await asyncio.sleep(A_S + C_S * len(items))
        return [2 * item for item in items]


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapped() -> None:
        run(test())

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def outcomes(requests: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*requests, return_exceptions=True)
