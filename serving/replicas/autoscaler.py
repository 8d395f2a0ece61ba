"""Autoscaling by Ray Serve, where `scaling.wanted_replicas` decides by what the front measures.

The front writes its load to the cluster's key-value store, a few times a second. Serve's controller asks the policy,
which reads it there. Serve's own metrics would not do: they do not include a queue outside Serve, and nothing at all
without replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from orchestray.platform.cluster import key_values
from orchestray.serving.batching import Batcher
from orchestray.serving.replicas.scaling import IDLE_BEFORE_ZERO_S, Load, ScalingGoal, wanted_replicas

_log = logging.getLogger("orchestray.serving")

REPORT_EVERY_S = 0.25
_RATE_OVER_S = 2.0
"""Time constant in seconds over which the rate is averaged."""


class ScalingPolicy:
    """The policy that Serve's controller calls, a few times a second.

    Args:
        key: key under which the front writes its load.
        least, most, target_latency_s, idle_before_zero_s: the goal (see `ScalingGoal`).
    """

    def __init__(
        self, key: str, least: int, most: int, target_latency_s: float, idle_before_zero_s: float = IDLE_BEFORE_ZERO_S
    ) -> None:
        self._key = key
        self._goal = ScalingGoal(least, most, target_latency_s, idle_before_zero_s)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas that there should be, and an empty state."""
        written = key_values.get(self._key)
        if written is None:
            return max(context.target_num_replicas, self._goal.least), {}
        load = Load(**written)
        return wanted_replicas(load, context.target_num_replicas, self._goal), {}


class LoadMeter:
    """A meter of the load of one batcher, from its counters."""

    def __init__(self, batcher: Batcher[Any, Any], now_s: float) -> None:
        self._batcher = batcher
        self._last_s = now_s
        self._asked_s = now_s
        self._num_arrived = 0
        self._rate_per_s = 0.0
        self._had_runner = True

    def measure(self, now_s: float) -> Load:
        """Return the load now, on the loop's clock."""
        stats = self._batcher.stats
        num_arrived = stats.num_answered + stats.num_queued + stats.num_in_flight + sum(stats.num_shed.values())
        elapsed_s = now_s - self._last_s
        if elapsed_s > 0:
            came = max(0, num_arrived - self._num_arrived)
            weight = -math.expm1(-elapsed_s / _RATE_OVER_S)
            self._rate_per_s += weight * (came / elapsed_s - self._rate_per_s)
            self._num_arrived, self._last_s = num_arrived, now_s
            has_come = stats.num_runners > 0 and not self._had_runner
            if came or stats.num_queued or stats.num_in_flight or has_come:
                self._asked_s = now_s
        self._had_runner = stats.num_runners > 0
        return Load(
            rate_per_s=self._rate_per_s,
            num_queued=stats.num_queued,
            a_s=stats.a_s,
            c_s=stats.c_s,
            max_batch_size=self._batcher.max_batch_size,
            idle_s=now_s - self._asked_s,
            has_runner=self._had_runner,
        )


async def ask_for_replica(key: str) -> None:
    """Write a load that needs a replica, until `report_load` writes that of a batcher."""
    load = Load(rate_per_s=0.0, num_queued=1, a_s=0.0, c_s=0.0, max_batch_size=1, idle_s=0.0, has_runner=False)
    await asyncio.to_thread(key_values.put, key, asdict(load))


async def report_load(batcher: Batcher[Any, Any], key: str) -> None:
    """Write the load to the key that the policy reads, until cancelled."""

    async def write(load: dict[str, Any]) -> None:
        await asyncio.to_thread(key_values.put, key, load)

    try:
        await keep_reporting(batcher, write)
    finally:
        with contextlib.suppress(Exception):  # the cluster may be gone already
            await asyncio.to_thread(key_values.delete, key)


async def keep_reporting(batcher: Batcher[Any, Any], write: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """Write the load periodically, until cancelled; after a failed write try again with the next.

    Without a load the policy would leave the number of replicas unchanged, even if it is 0.

    Args:
        batcher: batcher whose load is measured.
        write: writes the fields of a `Load`.
    """
    loop = asyncio.get_running_loop()
    meter = LoadMeter(batcher, loop.time())
    is_failing = False
    while True:
        try:
            await write(asdict(meter.measure(loop.time())))
            is_failing = False
        except Exception as error:  # noqa: BLE001 - of any kind: Ray's errors have no common base class
            if not is_failing:
                _log.warning("the load cannot be told to Ray's autoscaler, and replicas do not follow it: %s", error)
            is_failing = True
        await asyncio.sleep(REPORT_EVERY_S)
