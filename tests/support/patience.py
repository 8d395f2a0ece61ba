"""Limit of waits in tests, on however slow a machine: only what hangs takes longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""Less than pytest's `faulthandler_timeout`, which ends the whole process."""


async def until(what: str, condition: Callable[[], bool]) -> None:
    """Wait for a condition, which another thread looks at; `what` says in an error what did not come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline_s, f"{what}: never"
        await asyncio.sleep(0.1)
