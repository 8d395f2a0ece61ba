"""The decision to take a new version back: from its answers, by bounds on failures and on latency."""

from __future__ import annotations

import math
from collections import deque

SLOW_PER_CENT = 1.0
"""Per cent of the requests that may be slower than the 99th percentile."""
_RECENT_S = 5.0
_EVIDENCE = math.log(1000.0)
"""Evidence that is enough: a version at its bound shows as much in one of 1,000 looks at the most."""
_REFUSED = 400
"""Least status of requests that the model has not answered; of those from here on, only `_FAILED` is of its own."""
_FAILED = 500
"""Status of requests on which the model failed, and the least one that counts as a failure."""


class Verdict:
    """The judgement of one new version, from its answers so far and from those of the last seconds.

    A share of bad answers above its bound may be chance. If the bound holds, k bad ones of n answers have a probability
    of exp(-n KL(k/n, bound)) at most (Chernoff, 1952).

    Args:
        began_s: time of the change; requests that came before are not counted.
        error_rate: per cent of the requests that may fail; None: any.
        p99_ms: bound of the 99th percentile of the latency, in milliseconds; None: none.
    """

    def __init__(self, began_s: float, *, error_rate: float | None, p99_ms: float | None) -> None:
        self._began_s = self._lived_s = self._started_s = began_s
        self._error_rate = error_rate
        self._p99_s = math.inf if p99_ms is None else p99_ms / 1e3
        self._all = [0, 0, 0]
        self._recent: deque[tuple[float, bool, bool]] = deque()
        self._recent_sums = [0, 0, 0]
        self._pending_since_s: float | None = None

    def answered(self, now_s: float, status: int, seconds: float) -> None:
        """Count an answer with this HTTP status, `seconds` after its request came."""
        came_s = now_s - seconds
        if came_s < self._began_s:
            return
        if status < _REFUSED or status == _FAILED:  # a hung version has clients that give up, and a queue that refuses
            self.lives(now_s)
        if came_s < self._started_s and status != _FAILED:
            return  # it waited for a first replica, or was refused for want of one
        answer = (now_s, status >= _FAILED, seconds > self._p99_s)
        self._recent.append(answer)
        self._add(self._all, answer, 1)
        self._add(self._recent_sums, answer, 1)

    def lives(self, now_s: float) -> None:
        """Note a sign of life: the model has answered, or a part of an answer has come."""
        self._lived_s = now_s

    def starts(self, now_s: float) -> None:
        """Note that a first replica is still to come: requests wait for it, or are refused for want of it."""
        self._started_s = now_s

    def reason(self, now_s: float, num_pending: int) -> str | None:
        """Return why the version must go back, as a clause, or None.

        Args:
            now_s: the time.
            num_pending: number of its requests that wait or run.
        """
        while self._recent and self._recent[0][0] < now_s - _RECENT_S:
            self._add(self._recent_sums, self._recent.popleft(), -1)
        for num, num_failed, num_slow in (self._all, self._recent_sums):
            if self._error_rate is not None and _is_above(num_failed, num, self._error_rate / 100.0):
                return f"{num_failed} of {num} requests failed, more than {self._error_rate:g} %"
            if _is_above(num_slow, num, SLOW_PER_CENT / 100.0):
                return f"{num_slow} of {num} requests took more than {self._p99_s * 1e3:g} ms"
        if num_pending == 0:
            self._pending_since_s = None
            return None
        if self._pending_since_s is None:
            self._pending_since_s = now_s
        silent_s = now_s - max(self._lived_s, self._started_s, self._pending_since_s)
        if silent_s > max(_RECENT_S, 0.0 if self._p99_s == math.inf else self._p99_s):
            return f"no request was answered for {silent_s:.0f} s"
        return None

    @staticmethod
    def _add(sums: list[int], answer: tuple[float, bool, bool], sign: int) -> None:
        for index, value in enumerate((1, answer[1], answer[2])):
            sums[index] += sign * value


def _is_above(num_bad: int, num: int, bound: float) -> bool:
    """Return True if `num_bad` of `num` is more than chance explains where a share of `bound` may be bad."""
    if num_bad <= bound * num:
        return False
    if bound == 0.0:
        return True
    share = num_bad / num
    divergence = share * math.log(share / bound)
    if share < 1.0:
        divergence += (1.0 - share) * math.log((1.0 - share) / (1.0 - bound))
    return num * divergence > _EVIDENCE
