"""The toy of the paper on population-based training: Jaderberg et al. 2017, figure 2.

Two parameters, both 0.9 at first, are to maximise Q = 1.2 - (a^2 + b^2). Trials follow the gradient of a surrogate,
1.2 - (h_a a^2 + h_b b^2), whose two hyper-parameters are searched. A trial that keeps (1, 0) or (0, 1) for good
leaves one parameter where it was: Q = 1.2 - 0.81 = 0.39.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from orchestray.search.methods.base import Exploit, Method, Proposal
from orchestray.search.simulation.virtual_time import Simulated, simulate
from orchestray.search.spaces.dimensions import Dimension, Uniform

NUM_STEPS = 200
RATE = 0.01
SPACE: Mapping[str, Dimension] = {"h.a": Uniform(0.0, 1.0), "h.b": Uniform(0.0, 1.0)}
CORNERS = ({"h.a": 1.0, "h.b": 0.0}, {"h.a": 0.0, "h.b": 1.0}, {"h.a": 0.9, "h.b": 0.0}, {"h.a": 0.0, "h.b": 0.9})
"""Grid search's; the last two are a little slower, as a rule that wants the better of two finds none among equals."""

EXPLORE: Mapping[str, Any] = {"explore": "both", "resample_probability": 0.5}
"""A perturbation alone seldom leaves a corner."""


class Toy:
    """The members' parameters, and the steps that each has done."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[int, np.ndarray]] = {}

    def evaluate(self, proposal: Proposal, step: int) -> float:
        done, theta = self.states.get(proposal.trial, (0, np.full(2, 0.9)))
        h = np.array([proposal.changes["h.a"], proposal.changes["h.b"]])
        theta = theta * (1.0 - 2.0 * RATE * h) ** (step - done)
        self.states[proposal.trial] = step, theta
        return 1.2 - float(theta @ theta)

    def become(self, trial: int, decision: Exploit) -> None:
        done, theta = self.states[decision.source]
        self.states[trial] = done, theta.copy()

    def run(self, method: Method, **how: Any) -> Simulated:
        return simulate(method, self.evaluate, on_become=self.become, **how)
