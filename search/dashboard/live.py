"""What is new, to every page that looks: one task looks at the files for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, TypeVar

from orchestray.platform.run.files import dump_json

SCAN_S = 0.5
"""Between two looks at the files."""

_KEEP_ALIVE_S = 15.0
_MAX_WAITING = 64
"""Messages that a page may be behind with; then it is sent everything anew."""

_MAX_IDLE = 8
"""Topics that are kept though nobody looks at them, so that coming back to a page is quick."""


class Followed(Protocol):
    """Something that a page shows."""

    def refresh(self) -> dict[str, Any] | None:
        """What is new since the last call; None: nothing."""

    def snapshot(self) -> dict[str, Any]:
        """All of it."""


View = TypeVar("View", bound=Followed)
Answer = TypeVar("Answer")


class Topic(Generic[View]):
    """A view, and the pages that look at it."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.pages: set[asyncio.Queue[str | None]] = set()
        self._turn = asyncio.Lock()

    async def ask(self, question: Callable[[View], Answer]) -> Answer:
        """Ask the view, in a thread, while nobody else does."""
        async with self._turn:
            return await asyncio.to_thread(question, self.view)

    async def join(self) -> tuple[asyncio.Queue[str | None], str]:
        """A queue of what is new from now on, and everything until now."""
        async with self._turn:
            snapshot = await asyncio.to_thread(self._snapshot_text)
            page: asyncio.Queue[str | None] = asyncio.Queue(_MAX_WAITING)
            self.pages.add(page)
            return page, snapshot

    async def scan(self) -> None:
        """Send what is new to every page."""
        async with self._turn:
            text = await asyncio.to_thread(self._change_text)
            if text is None:
                return
            for page in list(self.pages):
                if page.full():  # it comes back, and is sent everything
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
    """The topics that pages look at, and the one task that scans them."""

    def __init__(self) -> None:
        self._topics: dict[tuple[str, str], Topic[Any]] = {}
        self._scanner: asyncio.Task[None] | None = None
        self._is_closed = False

    def topic(self, kind: str, name: str, make: Callable[[], View]) -> Topic[View]:
        """The topic of that kind and name; `make` makes its view if it is new."""
        found = self._topics.pop((kind, name), None)
        if found is None:
            found = Topic(make())
        self._topics[kind, name] = found  # the last of them: the first ones were not looked at for longest
        idle = [key for key, topic in self._topics.items() if not topic.pages and topic is not found]
        for key in idle[: max(0, len(idle) - _MAX_IDLE)]:
            del self._topics[key]
        return found

    async def follow(self, topic: Topic[Any]) -> AsyncIterator[str]:
        """Server-sent events: `snapshot` with everything, then a `change` whenever something is new."""
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
        """Look at the files while any page does."""
        while watched := [topic for topic in self._topics.values() if topic.pages]:
            await asyncio.sleep(SCAN_S)
            for topic in watched:
                await topic.scan()


def event(name: str, value: Any) -> str:
    """A server-sent event with a JSON value."""
    return f"event: {name}\ndata: {dump_json(value)}\n\n"
