"""Lateness of batches against the predictions made at arrival, as a reserve for later predictions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from orchestray.serving.batching.queue import Request

_KNOWN_BATCHES = 64
_SHARE = 0.95
_LEAST_KNOWN = 8


class Lateness:
    """The prediction errors of the last batches: pauses of the event loop, and batches that take longer.

    The queue of an overloaded server is filled until further requests would be late. So every request in it has just
    the predicted time: if one batch takes longer, all requests behind it are late at once.
    """

    def __init__(self) -> None:
        self._errors_s: deque[float] = deque(maxlen=_KNOWN_BATCHES)
        self._room_s: float | None = 0.0

    def note(self, answered_s: float, requests: Sequence[Request[Any, Any]]) -> None:
        """Note that a batch is answered at `answered_s`, or would be.

        The error is taken against the latest promise in the batch. Requests with earlier promises were overtaken by
        more urgent ones, which says nothing about the time of a batch.
        """
        promised_s = [request.expected_s for request in requests if request.expected_s < math.inf]
        self._errors_s.append(answered_s - max(promised_s, default=math.inf))
        self._room_s = None

    @property
    def room_s(self) -> float:
        """Seconds that almost all of the last batches needed beyond the prediction; at least 0."""
        if self._room_s is None:
            known = sorted(self._errors_s)
            enough = len(known) >= _LEAST_KNOWN
            self._room_s = max(0.0, known[int(_SHARE * (len(known) - 1))]) if enough else 0.0
        return self._room_s
