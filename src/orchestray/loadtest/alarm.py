"""An alarm of an event loop, exact to some ten microseconds: loops themselves count in whole milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1


class Alarm:
    """A timerfd of Linux, on the clock of `time.monotonic`; `os` has it only from Python 3.13 on."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._file = self._library.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._call: Callable[[], None] | None = None
        asyncio.get_running_loop().add_reader(self._file, self._ring)

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call a function at that time, or as soon as possible if it is past; replaces the earlier setting."""
        self._call = call
        seconds, nanoseconds = divmod(max(1, int(when_s * 1e9)), 1_000_000_000)
        setting = (ctypes.c_long * 4)(0, 0, seconds, nanoseconds)  # an interval of 0: it rings once
        if self._library.timerfd_settime(self._file, _ABSOLUTE, setting, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def _ring(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:
            return  # it was set again after it rang
        call, self._call = self._call, None
        if call is not None:
            call()

    def close(self) -> None:
        """Cancel the call."""
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)
