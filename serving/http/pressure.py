"""How long requests wait to be read: where more come than this process can read, some are refused while they are cheap.

A server that reads everything answers nothing in time: each request waits behind all that came before it, and its
deadline, if it begins when it is read, says nothing of that.
"""

from __future__ import annotations

import asyncio

_PERIOD_S = 0.005
_LATE_S = 0.010
_SUSTAINED_BEATS = 4
"""So many in a row are late before it counts: one long callback, as when a model is loaded, is no overload."""
_QUIET_BEATS = 200
"""Without a request for so long, nothing ticks."""


class Pressure:
    """Watches an event loop: a timer that fires late tells how long one round of the loop takes, and that is how long
    what is read in it has waited. Ticks only while requests come.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before_s = 0.0
        """When the timer fired, the time before last: what is handled now was read after that."""
        self._last_s = 0.0
        self._late_beats = 0
        self._beats_since_request = 0

    def waited_s(self, loop: asyncio.AbstractEventLoop) -> float:
        """An estimate of how long a request that is handled now has waited to be read; 0 where there is no lasting
        overload.
        """
        self._beats_since_request = 0
        now_s = loop.time()
        if self._loop is not loop:
            self._loop = loop
            self._before_s = self._last_s = now_s
            self._late_beats = 0
            loop.call_later(_PERIOD_S, self._beat)
            return 0.0
        if self._late_beats < _SUSTAINED_BEATS:
            return 0.0
        return max(0.0, now_s - (self._before_s + self._last_s) / 2 - 1.5 * _PERIOD_S)

    def _beat(self) -> None:
        loop = self._loop
        assert loop is not None
        now_s = loop.time()
        late = now_s - self._last_s > _PERIOD_S + _LATE_S
        self._late_beats = self._late_beats + 1 if late else 0
        self._before_s, self._last_s = self._last_s, now_s
        self._beats_since_request += 1
        if self._beats_since_request > _QUIET_BEATS:
            self._loop = None
            return
        loop.call_later(_PERIOD_S, self._beat)
