"""Sums of a worker's time and traffic over a run, taken from what its network reports after each step."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from orchestray.platform.data.stream import Share
    from orchestray.platform.process.wait_clock import Waiting
    from orchestray.trainers.core.network import Usage
    from orchestray.trainers.layout.groups import Groups


class UsageSum:
    """A sum of a worker's usage; it starts again at zero with each generation of the gang."""

    def __init__(self) -> None:
        self._rank = 0
        self._busy_s = 0.0
        self._span_s = 0.0
        self._bytes_by_link: Counter[str] = Counter()
        self._timeline: list[dict[str, Any]] = []
        self._num_shares = 0
        self._num_samples = 0
        self._worked_s = 0.0
        self._waited_s = 0.0

    def begin(self, groups: Groups) -> None:
        self.__init__()  # type: ignore[misc]  # forget what another generation did
        self._rank = groups.rank

    def add(self, usage: Usage, line: dict[str, Any], step: int) -> None:
        """Add the usage of a step, and put `bubble` in the step's metric line if there is a pipeline schedule."""
        self._busy_s += usage.busy_s
        self._span_s += usage.span_s
        self._bytes_by_link.update(usage.bytes_by_link)
        if usage.span_s > 0:
            line["bubble"] = round(max(0.0, 1.0 - usage.busy_s / usage.span_s), 6)
        if usage.timeline:
            self._timeline = usage.timeline

    def count(self, shares: Iterable[Share]) -> Iterator[Share]:
        """Yield the same shares, and count each when it is taken."""
        for share in shares:
            self._num_shares += 1
            self._num_samples += share.num_samples
            yield share

    @contextlib.contextmanager
    def training(self, waiting: Waiting) -> Iterator[None]:
        """Count the time inside as training, except for what this worker spends waiting."""
        began_s, waited_before_s = time.perf_counter(), waiting.total_s
        yield
        waited_s = waiting.total_s - waited_before_s
        self._waited_s += waited_s
        self._worked_s += time.perf_counter() - began_s - waited_s

    def summary(self) -> dict[str, Any]:
        """Return all sums as JSON values."""
        return {
            "rank": self._rank,
            "busy_s": round(self._busy_s, 6),
            "span_s": round(self._span_s, 6),
            "bytes_by_link": dict(self._bytes_by_link),
            "timeline": self._timeline,
            "worker": {
                "shares": self._num_shares,
                "samples": self._num_samples,
                "busy_s": round(self._worked_s, 6),
                "waited_s": round(self._waited_s, 6),
            },
        }
