"""The handwritten digits from a source of a limited rate.

A config names the task by module and class, as `task.type=orchestray.trainers.tasks.paced_digits:PacedDigits`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import TaskError
from orchestray.trainers.tasks.digits import Digits

if TYPE_CHECKING:
    import pyarrow as pa

    from orchestray.platform.task import Batch


class PacedDigits(Digits):
    """The digits, each worker's read at a limited rate: what trains on them can be no faster than what feeds it.

    Rows are handed over when the time of all of them has passed. A pause of the reader is not made up for.

    Args:
        samples_per_s: most samples that a worker reads in a second.
        digits: arguments of `Digits`.
    """

    def __init__(self, samples_per_s: float, **digits: Any) -> None:
        super().__init__(**digits)
        if not samples_per_s > 0:
            raise TaskError(f"task.samples_per_s must be above 0, got {samples_per_s}")
        self._pace = Pace(samples_per_s)

    def to_batch(self, columns: pa.Table) -> Batch:
        self._pace.wait(columns.num_rows)
        return super().to_batch(columns)


class Pace:
    """A limit of a rate.

    Args:
        per_s: most that may pass in a second.
        clock: the time in seconds.
        sleep: waits, given the seconds.
    """

    def __init__(
        self, per_s: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._per_s, self._clock, self._sleep = per_s, clock, sleep
        self._free_s = clock()
        self._lock = threading.Lock()

    def wait(self, number: int) -> None:
        """Return when this number may have passed, after all before it."""
        with self._lock:
            self._free_s = max(self._free_s, self._clock()) + number / self._per_s
            until_s = self._free_s
        while (left_s := until_s - self._clock()) > 0:
            self._sleep(left_s)
