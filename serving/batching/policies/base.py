"""When to run a batch that is not full: what a policy is told, and what it is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from orchestray.serving.batching.service_time import ServiceTimeModel


@dataclass(frozen=True, slots=True)
class Opportunity:
    """A runner is free, and there are requests, fewer than a batch may hold."""

    now_s: float
    num_queued: int
    oldest_s: float
    """When the oldest of them arrived."""
    num_idle: int
    """Free runners, this one counted."""
    next_free_s: float
    """Seconds until another runner is expected to be free: 0 if one is, infinite if there is none."""


class Policy(ABC):
    """Decides how long a free runner waits for more requests. Holds no timers and reads no clock."""

    is_asked_again = False
    """Whether it is asked once more when the wait is over, and may then wait on: it must come to an end by itself."""

    def bind(self, *, max_batch_size: int, objective: str, model: ServiceTimeModel) -> None:
        """Called once, before anything else, with what the batcher was made with."""
        self.max_batch_size = max_batch_size
        self.objective = objective
        self.model = model

    def arrived(self, now_s: float) -> None:  # noqa: B027 - most policies need not know
        """A request arrived, whatever the runners do."""

    def finished(self, now_s: float, num_items: int) -> None:  # noqa: B027
        """A runner has answered a batch of `num_items` and is free."""

    @abstractmethod
    def wait_s(self, opportunity: Opportunity) -> float:
        """Seconds to wait before what is queued is run; 0: run it now. Asked again at every arrival."""
