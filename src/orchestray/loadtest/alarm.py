"""Alarms of an event loop, exact to some ten microseconds: loops themselves count in whole milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

from orchestray.loadtest.drive import Alarm

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_LEAST_NS = 1


class LoopAlarm:
    """An alarm by a timer of the loop, for a clock that runs at the loop's speed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        self.close()
        self._timer = self._loop.call_later(max(0.0, when_s - self._clock()), call)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


class TimerFileAlarm:
    """An alarm by a timerfd (Linux), on the clock of `time.monotonic`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._file = self._library.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._setting = _Setting()
        self._call: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._ring)

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        self._call = call
        when_ns = max(_LEAST_NS, int(when_s * 1e9))
        self._setting.value.seconds, self._setting.value.nanoseconds = divmod(when_ns, 1_000_000_000)
        if self._library.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(self._setting), None) < 0:
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
        self._loop.remove_reader(self._file)
        os.close(self._file)


def make_alarm() -> Alarm:
    """Return the most exact alarm of this system, on the clock of `time.monotonic`."""
    return TimerFileAlarm() if sys.platform == "linux" else LoopAlarm(time.monotonic)
