"""Never wait."""

from __future__ import annotations

from orchestray.serving.batching.policies.base import Opportunity, Policy


class Greedy(Policy):
    """Runs what there is as soon as a runner is free: within 1 % of the best for memoryless arrivals.

    Deb and Serfozo (Optimal control of batch service queues, Adv. Appl. Prob. 5, 1973) show the best policy for
    Poisson arrivals to be a threshold on the number that waits, never on time; for one server and a mean of latency
    the threshold is worth less than 1 %.
    """

    def wait_s(self, opportunity: Opportunity) -> float:
        return 0.0
