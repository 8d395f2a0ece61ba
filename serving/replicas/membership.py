"""Membership of fronts in an endpoint: the protocol by which they take over a change from the directory.

A change is prepared by every front, and then taken over by all, or by none if one could not prepare it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.replicas import wire

_log = logging.getLogger("orchestray.serving")

Agree = Callable[[], Awaitable[None]]
"""Function that a front calls after preparing a change; returns when all have, raises OrchestrayError if one cannot."""
Apply = Callable[[dict[str, Any], Agree], Awaitable[None]]
"""Function with which a front takes over a change."""


class FrontLink:
    """A front from the directory's point of view."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._prepared: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._number = 0
        """Number of the change; answers to changes given up meanwhile are ignored."""
        self.is_gone = False

    async def prepare(self, change: dict[str, Any]) -> str | None:
        """Have the front prepare to take over a change; return its error, or None."""
        self._number += 1
        loop = asyncio.get_running_loop()
        self._prepared, self._done = loop.create_future(), loop.create_future()
        self._write({"kind": "apply", "change": change})
        return await self._prepared

    def decide(self, *, holds: bool) -> None:
        """Have the front take over what it has prepared, or discard it."""
        if not self._done.done():  # it waits for that, or will
            self._write({"kind": "decided", "holds": holds})

    async def done(self) -> None:
        """Return when the front has done so."""
        error = await self._done
        if error is not None:
            _log.info("a front has not taken a change over: %s", error)

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read the front's answers until it goes."""
        try:
            while True:
                header, _ = await wire.receive(reader)
                if header["number"] == self._number:
                    self._record(header["error"], is_done=header["kind"] == "applied")
        except (OSError, EOFError, wire.WireError):
            pass
        finally:
            self.is_gone = True
            self._record(None, is_done=True)

    def _write(self, header: dict[str, Any]) -> None:
        try:
            if not self.is_gone:
                wire.write(self._writer, {**header, "number": self._number})
        except OSError:
            self.is_gone = True
        if self.is_gone:
            self._record(None, is_done=True)

    def _record(self, error: str | None, *, is_done: bool) -> None:
        """Record that the front has prepared a change, or is done with it (also after a failed preparation)."""
        for each in (self._prepared, self._done) if is_done else (self._prepared,):
            if not each.done():
                each.set_result(error)


class Membership:
    """A front's connection to the directory."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, apply: Apply) -> None:
        self._reader = reader
        self._writer = writer
        self._apply = apply
        self._number = 0
        self._serving: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        """Event that is set when the endpoint has ended."""

    async def begin(self) -> None:
        """Take over the current state, and from then on each change.

        Raises:
            OrchestrayError: the state could not be taken over; the front does not belong to the endpoint.
        """
        error = await self._next()
        if error is not None:
            self._writer.close()
            raise OrchestrayError(error)
        self._serving = asyncio.create_task(self._serve())

    def close(self) -> None:
        """Take over no more changes."""
        if self._serving is not None:
            self._serving.cancel()
        self._writer.close()

    async def _serve(self) -> None:
        try:
            while True:
                await self._next()
        except (OSError, EOFError, wire.WireError):
            self.ended.set()

    async def _next(self) -> str | None:
        """Take over the next change; return its error, or None."""
        header, _ = await wire.receive(self._reader)
        if header["kind"] != "apply":
            return None  # of a change that was given up
        self._number = header["number"]
        error: str | None = None
        try:
            await self._apply(header["change"], self._agree)
        except OrchestrayError as failed:
            error = str(failed)
        except Exception as failed:  # noqa: BLE001 - whatever it is, this front serves as before, and reports it
            _log.exception("a change could not be taken over")
            error = f"a front could not take the change over, its log has more: {type(failed).__name__}: {failed}"
        await wire.send(self._writer, {"kind": "applied", "number": self._number, "error": error})
        return error

    async def _agree(self) -> None:
        header: dict[str, Any] = {}
        try:
            await wire.send(self._writer, {"kind": "prepared", "number": self._number, "error": None})
            while header.get("number") != self._number:
                header, _ = await wire.receive(self._reader)
        except (OSError, EOFError, wire.WireError) as error:  # the next read or write fails in `_serve`, too
            raise OrchestrayError("the endpoint has ended") from error
        if not header["holds"]:
            raise OrchestrayError("another front could not take the change over")
