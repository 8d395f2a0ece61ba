"""State that the parts of one batcher share: queue, runners, listener and shutdown."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

from orchestray.serving.batching.admission import Admission
from orchestray.serving.batching.listener import BatchListener
from orchestray.serving.batching.policies import Greedy, Policy
from orchestray.serving.batching.policies.service_time import ServiceTimeModel
from orchestray.serving.batching.queue import Request, RequestQueue
from orchestray.serving.batching.runner import RunnerHandle

In = TypeVar("In")
Out = TypeVar("Out")


class Core(Generic[In, Out]):
    """The state of one batcher.

    Args:
        policy: decides when a batch that is not full is run.
        max_batch_size: largest number of requests in one call of a runner.
        objective: what the policy optimizes.
        listener: receives the events of the batcher.
    """

    def __init__(self, policy: Policy, max_batch_size: int, objective: str, listener: BatchListener) -> None:
        self.max_batch_size = max_batch_size
        self.model = ServiceTimeModel(max_batch_size)
        self.listener = listener
        self.policy = policy
        self.policy.bind(max_batch_size=max_batch_size, objective=objective, model=self.model)
        self.queue: RequestQueue[In, Out] = RequestQueue()
        self.runners: list[RunnerHandle[In, Out]] = []
        self.retiring: set[RunnerHandle[In, Out]] = set()
        """Runners that get no more batches but still run one."""
        self.admission = Admission(self.queue, self.runners, self.model, max_batch_size)
        self.closed = self.abandoned = False
        self.drained = asyncio.Event()
        self.num_shed: Counter[str] = Counter()

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop on which the batcher was used first, and to which it belongs."""
        return asyncio.get_running_loop()

    def forget(self, request: Request[In, Out]) -> None:
        """Drop a request whose caller no longer waits: it leaves the queue at once."""
        if request.timer is not None:
            request.timer.cancel()
        if request.queued:
            self.queue.remove(request)
            self.note_drained()

    def note_drained(self) -> None:
        """Set `drained` if the batcher is closed and nothing runs or can still be run."""
        is_over = self.closed and not self.retiring and not (self.queue and self.runners)
        if is_over and not any(runner.flights for runner in self.runners):
            self.drained.set()

    def count_shed(self, reason: str) -> None:
        """Count a request that is not run, and report it to the listener."""
        self.num_shed[reason] += 1
        self.tell(self.listener.shed, reason)

    def tell(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method of the listener; an exception in it is reported and affects no request."""
        try:
            method(*arguments)
        except Exception as error:  # noqa: BLE001 - the user's function
            self.loop.call_exception_handler({"message": "a listener of a batcher raised", "exception": error})

    def give_up_policy(self, error: Exception) -> None:
        """Replace the policy by a greedy one: one that fails must not leave requests waiting."""
        self.policy = Greedy()
        text = "the policy of a batcher failed; from now on batches do not wait for more requests"
        self.loop.call_exception_handler({"message": text, "exception": error})
