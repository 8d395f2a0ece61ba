"""Server-sent events of batches as they happen, for pages that watch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson

_MEMORY = 240
"""Number of batches that a page gets when it opens."""
_EVERY_S = 0.1
"""Period in seconds at which batches are sent together: nobody sees more, and a busy endpoint has thousands."""
_SILENCE_S = 15.0
"""Seconds without batches after which a comment is sent: proxies close connections that seem dead."""


class LiveBatches:
    """A memory of the last batches that streams new ones to its followers. It belongs to one event loop."""

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
        """Publish a batch that has ended.

        Args:
            model, version: model version that ran it.
            size: number of its requests.
            queue_s: seconds that each request had waited.
            service_s: seconds that the batch took.
            wait_s: wait that the policy chose last.
            failed: True if the batch failed as a whole.
        """
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
        """Publish that a request was refused."""
        self._num_shed += 1
        for follower in self._followers:
            follower.changed.set()

    def close(self) -> None:
        """End every stream when the endpoint stops, since they do not end by themselves."""
        self._closed = True
        for follower in self._followers:
            follower.changed.set()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the stream of one page: first the remembered batches, then new ones."""
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
    """The batches that one page has not received yet."""

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
