"""`batch`: a function on lists becomes one on single items, with the parameters of Ray Serve's `@serve.batch`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial, wraps
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.serving.batching.batcher import Batcher
from orchestray.serving.batching.policies import Adaptive, Fixed

_BATCHERS = "_batchers_of_orchestray"
"""Attribute of an instance, or of a function, that maps what was decorated to its batcher."""


def batch(
    function: Callable[..., Awaitable[Sequence[Any]]] | None = None,
    /,
    *,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float | None = None,
    max_concurrent_batches: int = 1,
) -> Any:
    """Turn an `async` function or method on a list of items into one on an item, whose calls share batches.

    It takes the place of `@serve.batch` in a deployment of Ray Serve; Ray is not needed. An item whose batch raises is
    tried again with fewer others, so that only those fail that make it raise.

    Args:
        function: takes a list, returns an answer (or an exception) for each item; None: `batch(...)` is a decorator.
        max_batch_size: largest number of items in a call.
        batch_wait_timeout_s: seconds that the first item of a batch waits for others; None: learnt from the calls.
        max_concurrent_batches: calls of the function at a time.

    Raises:
        TypeError: the function is not `async`, or takes something else than a list.
        ConfigError: a number is out of its range.
    """
    if function is None:
        return partial(
            batch,
            max_batch_size=max_batch_size,
            batch_wait_timeout_s=batch_wait_timeout_s,
            max_concurrent_batches=max_concurrent_batches,
        )
    numbers = {"max_batch_size": max_batch_size, "max_concurrent_batches": max_concurrent_batches}
    problems = [f"{name}: must be >= 1, got {number}" for name, number in numbers.items() if number < 1]
    if batch_wait_timeout_s is not None and not 0 <= batch_wait_timeout_s < math.inf:
        problems.append(f"batch_wait_timeout_s: must be >= 0 and finite, or None, got {batch_wait_timeout_s}")
    if problems:
        raise ConfigError(problems)
    parameters = list(inspect.signature(function).parameters)
    if not inspect.iscoroutinefunction(function) or (parameters[:1] == ["self"] and len(parameters) != 2):
        raise TypeError(f"{function.__qualname__} must be an async function that takes a list of items")

    def make(run: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]) -> Batcher[Any, Any]:
        policy = Adaptive() if batch_wait_timeout_s is None else Fixed(1e3 * batch_wait_timeout_s)
        batcher: Batcher[Any, Any] = Batcher(policy=policy, max_batch_size=max_batch_size)
        for _ in range(max_concurrent_batches):
            batcher.add_runner(run)
        return batcher

    @wraps(function)
    async def ask(*arguments: Any) -> Any:
        *owner, item = arguments
        batchers = vars(owner[0] if owner else ask).setdefault(_BATCHERS, {})
        if ask not in batchers:  # not its name: a class may override a method and call that of its base
            batchers[ask] = make(partial(function, *owner))
        return await batchers[ask].submit(item)

    return ask
