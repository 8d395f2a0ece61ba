"""`batch`: a function on lists becomes one on single items, with the parameters of Ray Serve's `@serve.batch`."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial, wraps
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.serving.batching.batcher import Batcher
from orchestray.serving.batching.policies import Adaptive, Fixed

_BATCHERS = "_batchers_of_orchestray"
"""Attribute of an instance, a class or a function that holds its batchers."""


class _Batchers(dict[Any, Batcher[Any, Any]]):
    """The batchers of one owner, by what was decorated and the event loop; a copy of the owner begins without any."""

    owner: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Batchers, ()


def _batchers_of(owner: Any) -> _Batchers:
    """Return the batchers of an instance, a class or a function.

    Raises:
        TypeError: it takes no attributes.
    """
    if not hasattr(owner, "__dict__"):
        raise TypeError(f"batch: the owner of a batched method must take attributes, got a {type(owner).__name__}")
    found: _Batchers | None = vars(owner).get(_BATCHERS)
    if found is None or found.owner is not owner:  # a shallow copy has the batchers of what it was copied from
        found = _Batchers()
        found.owner = owner
        if isinstance(owner, type):
            setattr(owner, _BATCHERS, found)
        else:
            vars(owner)[_BATCHERS] = found
    return found


def _parameters_of(function: Callable[..., Any]) -> tuple[bool | None, list[inspect.Parameter]]:
    """Return True if the first parameter is the owner of a method (None: only a call shows it), and those required."""
    given = [*inspect.signature(function).parameters.values()]
    is_in_class = "." in function.__qualname__.rpartition("<locals>.")[2]
    has_owner = bool(given) and given[0].name in ("self", "cls")
    required = [each for each in given if each.default is inspect.Parameter.empty]
    return has_owner or (None if is_in_class and len(required) > 1 else False), required


def _is_method_of(owner: Any, method: Callable[..., Any]) -> bool:
    """Return True if a class has this function as a method, and `owner` is it or an instance of it."""
    mine = owner if isinstance(owner, type) else type(owner)
    found = [vars(base).get(method.__name__) for base in mine.__mro__]
    return any(each is method or (isinstance(each, classmethod) and each.__func__ is method) for each in found)


def batch(
    function: Callable[..., Awaitable[Sequence[Any]]] | None = None,
    /,
    *,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float | None = None,
    max_concurrent_batches: int = 1,
) -> Any:
    """Turn an `async` function or method on lists of items into one on an item, whose calls share batches.

    It takes the place of `@serve.batch` in a deployment of Ray Serve; Ray is not needed. An item whose batch raises is
    tried again with fewer others, so that only those fail that make it raise.

    Args:
        function: takes a list, or several of equal length; returns an answer (or an exception) for each item. Calls
            give one item of each list, by place or by name. None: `batch(...)` is a decorator.
        max_batch_size: largest number of items in a call.
        batch_wait_timeout_s: seconds that the first item of a batch waits for others; None: learnt from the calls.
        max_concurrent_batches: calls of the function at a time.

    Raises:
        TypeError: the function is not `async`, or takes something else than lists.
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
    has_owner, required = _parameters_of(function)
    lists = required[bool(has_owner) :]
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    if not inspect.iscoroutinefunction(function) or not lists or any(each.kind not in positional for each in lists):
        raise TypeError(f"{function.__qualname__} must be an async function that takes a list of items, or several")

    async def run(owner: tuple[Any, ...], items: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        answers: Sequence[Any] = await function(*owner, *map(list, zip(*items, strict=True)))
        return answers

    def make(owner: tuple[Any, ...]) -> Batcher[Any, Any]:
        policy = Adaptive() if batch_wait_timeout_s is None else Fixed(1e3 * batch_wait_timeout_s)
        batcher: Batcher[Any, Any] = Batcher(policy=policy, max_batch_size=max_batch_size)
        for _ in range(max_concurrent_batches):
            batcher.add_runner(partial(run, owner))
        return batcher

    @wraps(function)
    async def ask(*arguments: Any, **named: Any) -> Any:
        # A static method is called like a function, and its decorator is above this one.
        begin = _is_method_of(arguments[0], ask) if has_owner is None and arguments else bool(has_owner)
        owner, items = arguments[:begin], arguments[begin:]
        if named or len(items) != len(required) - begin:
            items = inspect.Signature(required[begin:]).bind(*items, **named).args
        batchers = _batchers_of(owner[0] if owner else ask)
        key = ask, asyncio.get_running_loop()  # not its name: a class may override a method and call that of its base
        if key not in batchers:
            for other in [one for one in batchers if one[1].is_closed()]:
                del batchers[other]
            batchers[key] = make(owner)
        return await batchers[key].submit(items)

    return ask
