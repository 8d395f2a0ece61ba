"""A guard around policies: one that fails must not leave requests waiting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from orchestray.serving.batching.policies.base import Opportunity, Policy
from orchestray.serving.batching.policies.greedy import Greedy
from orchestray.serving.batching.policies.service_time import ServiceTimeModel


class Guarded(Policy):
    """A policy that follows another until that raises or waits for ever, and is greedy from then on.

    Args:
        policy: the other one.
        report: called with its error, once.
    """

    def __init__(self, policy: Policy, report: Callable[[Exception], None]) -> None:
        self._policy = policy
        self._report = report

    @property
    def is_asked_again(self) -> bool:  # type: ignore[override]
        return self._policy.is_asked_again

    def bind(self, *, max_batch_size: int, objective: str, model: ServiceTimeModel) -> None:
        super().bind(max_batch_size=max_batch_size, objective=objective, model=model)
        self._policy.bind(max_batch_size=max_batch_size, objective=objective, model=model)

    def describe(self) -> dict[str, Any]:
        return self._policy.describe()

    def arrived(self, now_s: float) -> None:
        try:
            self._policy.arrived(now_s)
        except Exception as error:  # noqa: BLE001 - the user's policy
            self._give_up(error)

    def finished(self, now_s: float, num_items: int) -> None:
        try:
            self._policy.finished(now_s, num_items)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)

    def wait_s(self, opportunity: Opportunity) -> float:
        try:
            wait_s = float(self._policy.wait_s(opportunity))
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
            return 0.0
        if not math.isfinite(wait_s):
            self._give_up(ValueError(f"a policy must say for how many seconds to wait, got {wait_s}"))
            return 0.0
        return wait_s

    def _give_up(self, error: Exception) -> None:
        greedy = Greedy()
        greedy.bind(max_batch_size=self.max_batch_size, objective=self.objective, model=self.model)
        self._policy = greedy
        self._report(error)
