"""The batches as they happen, for pages that look on: server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson

_MEMORY = 240
"""Batches a page gets when it opens."""
_EVERY_S = 0.1
"""Batches of this time go out together: an eye sees no more, and a busy endpoint has thousands."""
_SILENCE_S = 15.0
"""A comment after this long without batches: proxies end connections that seem dead."""


class LiveBatches:
    """Keeps the last batches, and hands new ones to those who follow. Lives on one event loop."""

    def __init__(self) -> None:
        self._last: deque[dict[str, Any]] = deque(maxlen=_MEMORY)
        self._followers: set[_Follower] = set()
        self._num_requests = 0
        self._num_shed = 0
        self._closed = False

    def batch(
        self,
        *,
        model: str,
        version: str,
        size: int,
        queue_s: Sequence[float],
        service_s: float,
        wait_s: float,
        failed: bool,
    ) -> None:
        """A batch is done."""
        self._num_requests += size
        waited_s = sum(queue_s) / len(queue_s) if queue_s else 0.0
        line = {
            "time_s": time.time(),
            "model": model,
            "version": version,
            "size": size,
            "queue_ms": round(waited_s * 1e3, 3),
            "service_ms": round(service_s * 1e3, 3),
            "latency_ms": round((waited_s + service_s) * 1e3, 3),
            "wait_ms": round(wait_s * 1e3, 3),
            "failed": failed,
        }
        self._last.append(line)
        for follower in self._followers:
            follower.add(line)

    def shed(self) -> None:
        """A request was refused."""
        self._num_shed += 1
        for follower in self._followers:
            follower.changed.set()

    @property
    def num_followers(self) -> int:
        """Pages that look on."""
        return len(self._followers)

    def close(self) -> None:
        """End every stream: the endpoint ends, and they would not by themselves."""
        self._closed = True
        for follower in self._followers:
            follower.changed.set()

    async def events(self) -> AsyncGenerator[bytes]:
        """The stream of one page: what is remembered, then what happens."""
        follower = _Follower(self._last)
        self._followers.add(follower)
        try:
            while not self._closed:
                yield self._event(follower.take())
                while not self._closed:
                    try:
                        await asyncio.wait_for(follower.changed.wait(), _SILENCE_S)
                        break
                    except TimeoutError:
                        yield b": nothing\n\n"
                if not self._closed:
                    await asyncio.sleep(_EVERY_S)
        finally:
            self._followers.discard(follower)

    def _event(self, batches: list[dict[str, Any]]) -> bytes:
        state = {"batches": batches, "time_s": time.time(), "requests": self._num_requests, "shed": self._num_shed}
        return b"event: batches\ndata: " + orjson.dumps(state) + b"\n\n"


class _Follower:
    """What one page has not seen yet."""

    def __init__(self, seen: deque[dict[str, Any]]) -> None:
        self._lines = deque(seen, maxlen=_MEMORY)
        self.changed = asyncio.Event()

    def add(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        self.changed.set()

    def take(self) -> list[dict[str, Any]]:
        self.changed.clear()
        lines = list(self._lines)
        self._lines.clear()
        return lines
