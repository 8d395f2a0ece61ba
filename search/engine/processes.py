"""The processes of a search, which can be started before their tasks are known. Independent of Tune."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import ray

from orchestray.search.engine.messages import ORDINARY, TrialLimits, TrialTask
from orchestray.search.engine.trainable import HostedTrial
from orchestray.search.registry.programs import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def warm_modules(order: TrialTask) -> tuple[str, ...]:
    """Return the modules that a process for this task imports before the task has come."""
    return (PROGRAMS[ORDINARY].partition(":")[0],) if order.program == ORDINARY else ()


class Processes:
    """A starter of trial processes; a context manager that ends those that were not used.

    A process takes seconds for its imports. Started early, it performs them while the driver imports Tune.
    """

    def __init__(self, num_threads: int) -> None:
        wrap: Any = ray.remote(concurrency_groups={"control": 1})  # type: ignore[call-overload]  # a documented option
        self.actor_class: Any = wrap(HostedTrial)
        self._num_threads = num_threads
        self._early: deque[Any] = deque()

    def start_early(self, orders: Sequence[TrialTask], bundle: Mapping[str, float]) -> None:
        """Start a process for each of the first tasks.

        Args:
            orders: tasks that they will receive.
            bundle: CPUs and GPUs of each process.
        """
        amounts = dict(bundle)
        options = {"num_cpus": amounts.pop("CPU", 0), "num_gpus": amounts.pop("GPU", 0), "resources": amounts}
        for order in orders:
            self._early.append(self.actor_class.options(**options).remote(self._num_threads, warm_modules(order)))

    def take(self, placed: Any, rules: TrialLimits, order: TrialTask) -> Any:
        """Return a process that begins with a task, preferably one that was started early.

        Args:
            placed: `actor_class` with the resources of a process.
            rules: limits of the search.
            order: the first task.
        """
        process = self._early.popleft() if self._early else placed.remote(self._num_threads)
        process.begin.remote(rules, order)
        return process

    def close(self) -> None:
        """End the processes that were started early but not used."""
        while self._early:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.kill(self._early.popleft())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
