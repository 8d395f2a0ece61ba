"""Live updates for all open pages: a single task checks the files for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, TypeVar

from orchestray.platform.run.files import dump_json

SCAN_S = 0.5
"""Seconds between two checks of the files."""

_KEEP_ALIVE_S = 15.0
_MAX_WAITING = 64
"""Largest number of messages a page may lag behind; beyond that it reconnects and gets a full snapshot."""

_MAX_IDLE = 8
"""Number of topics kept although no page is open, so that returning to a page is quick."""


class Followed(Protocol):
    """The content of a page."""

    def refresh(self) -> dict[str, Any] | None:
        """Return the changes since the last call; None if there are none."""

    def snapshot(self) -> dict[str, Any]:
        """Return the whole content."""


View = TypeVar("View", bound=Followed)
Answer = TypeVar("Answer")


class Topic(Generic[View]):
    """A view, and the pages that show it."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.pages: set[asyncio.Queue[str | None]] = set()
        self._turn = asyncio.Lock()

    async def ask(self, question: Callable[[View], Answer]) -> Answer:
        """Call a function with the view, in a thread, while nothing else uses it."""
        async with self._turn:
            return await asyncio.to_thread(question, self.view)

    async def join(self) -> tuple[asyncio.Queue[str | None], str]:
        """Return a queue of changes from now on, and a snapshot until now."""
        async with self._turn:
            snapshot = await asyncio.to_thread(self._snapshot_text)
            page: asyncio.Queue[str | None] = asyncio.Queue(_MAX_WAITING)
            self.pages.add(page)
            return page, snapshot

    async def scan(self) -> None:
        """Send the changes to every page."""
        async with self._turn:
            text = await asyncio.to_thread(self._change_text)
            if text is None:
                return
            for page in list(self.pages):
                if page.full():  # it reconnects, and gets a snapshot
                    self.pages.discard(page)
                    page.get_nowait()
                    page.put_nowait(None)
                else:
                    page.put_nowait(text)

    def _snapshot_text(self) -> str:
        return event("snapshot", self.view.snapshot())

    def _change_text(self) -> str | None:
        change = self.view.refresh()
        return None if change is None else event("change", change)


class Hub:
    """The topics that pages show, and the single task that scans them."""

    def __init__(self) -> None:
        self._topics: dict[tuple[str, str], Topic[Any]] = {}
        self._scanner: asyncio.Task[None] | None = None
        self._is_closed = False

    def topic(self, kind: str, name: str, make: Callable[[], View]) -> Topic[View]:
        """Return the topic of that kind and name; `make` creates the view of a new one."""
        found = self._topics.pop((kind, name), None)
        if found is None:
            found = Topic(make())
        self._topics[kind, name] = found  # moved to the end: the first ones are the least recently used
        idle = [key for key, topic in self._topics.items() if not topic.pages and topic is not found]
        for key in idle[: max(0, len(idle) - _MAX_IDLE)]:
            del self._topics[key]
        return found

    async def follow(self, topic: Topic[Any]) -> AsyncIterator[str]:
        """Yield server-sent events: a `snapshot` with everything, then a `change` whenever something has changed."""
        page, snapshot = await topic.join()
        try:
            self._start()
            yield snapshot
            while not self._is_closed:
                try:
                    text = await asyncio.wait_for(page.get(), _KEEP_ALIVE_S)
                except TimeoutError:
                    text = ": still here\n\n"
                if text is None:
                    return
                yield text
        finally:
            topic.pages.discard(page)

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        if self._scanner is not None:
            self._scanner.cancel()
        for topic in self._topics.values():
            for page in topic.pages:
                if page.full():
                    page.get_nowait()
                page.put_nowait(None)

    def _start(self) -> None:
        if self._scanner is None or self._scanner.done():
            self._scanner = asyncio.create_task(self._scan())

    async def _scan(self) -> None:
        """Scan the files while any page is open."""
        while watched := [topic for topic in self._topics.values() if topic.pages]:
            await asyncio.sleep(SCAN_S)
            for topic in watched:
                await topic.scan()


def event(name: str, value: Any) -> str:
    """Return a server-sent event with a JSON value."""
    return f"event: {name}\ndata: {dump_json(value)}\n\n"
