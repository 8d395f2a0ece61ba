"""The interface of policies: when to run a batch that is not full."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from orchestray.serving.batching.policies.service_time import ServiceTimeModel


@dataclass(frozen=True, slots=True)
class Opportunity:
    """The situation in which a runner is free and fewer requests wait than a batch may hold."""

    now_s: float
    num_queued: int
    oldest_s: float
    """Arrival time of the oldest of them."""
    num_idle: int
    """Number of free runners, including this one."""
    next_free_s: float
    """Seconds until another runner is expected to be free: 0 if one is, infinite if there is none."""


class Policy(ABC):
    """A rule for how long a free runner waits for more requests. It holds no timers and reads no clock."""

    needs_timeout: ClassVar[bool] = False
    """True if its class takes the key `timeout_ms` of the config."""
    is_asked_again = False
    """True if it is asked again when the wait is over, and may extend it; its waits must then end by themselves."""

    def bind(self, *, max_batch_size: int, objective: str, model: ServiceTimeModel) -> None:
        """Set the parameters of the batcher; called once, before anything else.

        Args:
            max_batch_size: largest number of requests in a batch.
            objective: `mean`, `tail` or `throughput`.
            model: model of the service time, which keeps learning.
        """
        self.max_batch_size = max_batch_size
        self.objective = objective
        self.model = model

    def describe(self) -> dict[str, Any]:
        """Return the name of the rule and its parameters, as JSON values."""
        return {"policy": type(self).__name__}

    def arrived(self, now_s: float) -> None:  # noqa: B027 - most policies need not know
        """Note that a request arrived, whatever the runners do."""

    def finished(self, now_s: float, num_items: int) -> None:  # noqa: B027
        """Note that a runner has answered a batch of `num_items` and is free."""

    @abstractmethod
    def wait_s(self, opportunity: Opportunity) -> float:
        """Return the seconds to wait before what is queued is run; 0: run it now. Called again at every arrival."""
