"""The processes of a search, which may be started before it is known what they are to do. Knows no Tune."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import ray

from orchestray.search.engine.orders import ORDINARY, Order, Rules
from orchestray.search.engine.trainable import HostedTrial

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Processes:
    """Starts the processes of trials; a context manager that ends those that nobody has taken.

    A process takes seconds to import what it needs. Started early, it does so while the driver imports Tune.
    """

    def __init__(self, num_threads: int) -> None:
        wrap: Any = ray.remote(concurrency_groups={"control": 1})  # type: ignore[call-overload]  # a documented option
        self.actor_class: Any = wrap(HostedTrial)
        self._num_threads = num_threads
        self._early: deque[Any] = deque()

    def start_early(self, orders: Sequence[Order], bundle: Mapping[str, float]) -> None:
        """Start a process for each of the first orders.

        Args:
            orders: what they will be told to do.
            bundle: CPUs and GPUs of each.
        """
        amounts = dict(bundle)
        options = {"num_cpus": amounts.pop("CPU", 0), "num_gpus": amounts.pop("GPU", 0), "resources": amounts}
        for order in orders:
            module = order.program.partition(":")[0]
            warm = (module,) if order.program == ORDINARY else ()
            self._early.append(self.actor_class.options(**options).remote(self._num_threads, warm))

    def take(self, placed: Any, rules: Rules, order: Order) -> Any:
        """A process, one that was started early if there is one left, that begins with an order.

        Args:
            placed: `actor_class` with the resources of a process.
            rules: of the search.
            order: the first.
        """
        process = self._early.popleft() if self._early else placed.remote(self._num_threads)
        process.begin.remote(rules, order)
        return process

    def close(self) -> None:
        """End the processes that were started early and that nobody has taken."""
        while self._early:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.kill(self._early.popleft())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
