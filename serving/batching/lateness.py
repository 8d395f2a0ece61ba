"""By how much batches were later than was predicted when their requests came: room that later predictions are given."""

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
    """What predictions leave out, by the last batches: pauses of the event loop, and batches that take longer.

    A queue in front of a server that is overloaded is filled until who comes would be late. So every request in it has
    just the time that it was predicted to need: where one batch takes longer, all behind it are late at once.
    """

    def __init__(self) -> None:
        self._errors_s: deque[float] = deque(maxlen=_KNOWN_BATCHES)
        self._room_s: float | None = 0.0

    def note(self, answered_s: float, requests: Sequence[Request[Any, Any]]) -> None:
        """A batch is answered at this time, or would be.

        What counts is how late it is for the request that was promised last: who was promised more, and was overtaken
        by more urgent ones, says nothing of what a batch takes.
        """
        promised_s = [request.expected_s for request in requests if request.expected_s < math.inf]
        self._errors_s.append(answered_s - max(promised_s, default=math.inf))
        self._room_s = None

    @property
    def room_s(self) -> float:
        """What almost all of the last batches needed beyond the prediction; at least 0."""
        if self._room_s is None:
            known = sorted(self._errors_s)
            enough = len(known) >= _LEAST_KNOWN
            self._room_s = max(0.0, known[int(_SHARE * (len(known) - 1))]) if enough else 0.0
        return self._room_s
