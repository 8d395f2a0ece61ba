"""Injected faults: a pure plan that decides when a fault happens, and the one class that causes it.

Used by chaos tests and to study which faults a scheme tolerates (the config's `faults` section).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError

RESENT_AFTER_S = 0.2
"""Seconds after which a lost message is sent again: the minimum retransmission timeout of TCP on Linux."""
_MOST_LOST = 100

Fault = Mapping[str, Any]
"""Keys of a fault: kind, role, rank, at_step, factor, attack, scale."""


@dataclass(frozen=True)
class FaultPlan:
    """The faults of one process as pure decisions: every query with the same arguments returns the same answer."""

    faults: tuple[Fault, ...] = ()
    """Faults of this process."""
    kill_steps: tuple[int, ...] = ()
    """Steps of this attempt in which this process is killed."""
    seed: Sequence[int] = field(default=(0, 0))
    """Seed of random decisions, combined with the step."""

    @classmethod
    def of(
        cls, faults: Sequence[Fault], role: str, rank: int, *, attempt: int = 0, is_alone: bool = False, seed: int = 0
    ) -> FaultPlan:
        """Return the plan of the process `role`/`rank`.

        Args:
            faults: all faults of the run.
            role: role of the process.
            rank: rank of the process.
            attempt: number of steps with kills that are already over (`KillSchedule.num_over`). The n-th such step
            belongs to attempt n, from 0, so that a killed process is not killed again when the step is repeated.
            is_alone: True if only the killed process restarts, so that it counts its own attempts; else every kill of
            its role ends an attempt of all processes.
            seed: seed of the run.
        """
        own = tuple(fault for fault in faults if (fault["role"], fault["rank"]) == (role, rank))
        among = own if is_alone else [fault for fault in faults if fault["role"] == role]
        steps = sorted({fault["at_step"] for fault in among if fault["kind"] == "kill"})
        due = steps[attempt : attempt + 1]
        kills = tuple(fault["at_step"] for fault in own if fault["kind"] == "kill" and fault["at_step"] in due)
        return cls(own, kills, (seed, rank))

    def kills(self, step: int) -> bool:
        """Return True if the process is killed in this step."""
        return step in self.kill_steps

    def slow_factor(self, step: int) -> float:
        """Return the factor, at least 1, by which the computation of this step is slowed down."""
        slow = self._latest("slow", step)
        return 1.0 if slow is None else max(1.0, float(slow["factor"]))

    def delay_s(self, step: int) -> float:
        """Return the seconds by which each message of the process is delayed."""
        delay = self._latest("delay", step)
        return 0.0 if delay is None else float(delay["factor"])

    def drops(self, step: int, attempt: int) -> bool:
        """Return True if a message is lost.

        Args:
            step: step of the message.
            attempt: number of this attempt to send it; each attempt draws a new random number.
        """
        drop = self._latest("drop", step)
        return drop is not None and float(self._draws(step, attempt).random()) < float(drop["factor"])

    def num_lost(self, step: int) -> int:
        """Return how often the message of a step is lost before it arrives."""
        attempt = 0
        while attempt < _MOST_LOST and self.drops(step, attempt):
            attempt += 1
        return attempt

    def attack(self, gradients: Sequence[Tensor], step: int, generator: torch.Generator | None = None) -> None:
        """Overwrite the gradients, in place, with those that an attacker sends.

        `sign_flip` multiplies them by -`scale`; `gaussian` draws noise of standard deviation `scale`; `same_value`
        writes `scale` everywhere. The gradients do not change in a step without an attack.

        Args:
            gradients: gradients of this worker.
            step: step of the gradients.
            generator: generator of the noise; default: one seeded by this process and step.
        """
        fault = self._latest("byzantine", step)
        if fault is None or not gradients:
            return
        scale, kind = float(fault["scale"]), fault["attack"]
        if kind == "gaussian" and generator is None:
            drawn = int(self._draws(step, 0).integers(2**62))
            generator = torch.Generator(gradients[0].device).manual_seed(drawn)
        for gradient in gradients:
            if kind == "sign_flip":
                gradient.mul_(-scale)
            elif kind == "gaussian":
                gradient.normal_(0.0, scale, generator=generator)
            else:
                gradient.fill_(scale)

    def _latest(self, kind: str, step: int) -> Fault | None:
        """Return the fault of a kind that began last among those that have begun."""
        begun = [fault for fault in self.faults if fault["kind"] == kind and fault["at_step"] <= step]
        return max(begun, key=lambda fault: int(fault["at_step"]), default=None)

    def _draws(self, step: int, number: int) -> np.random.Generator:
        return np.random.default_rng([*(part % 2**64 for part in self.seed), step, number])


class Faults:
    """Causes the faults of a plan around the computation of a step."""

    def __init__(
        self,
        plan: FaultPlan | None = None,
        *,
        kill: Callable[[], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Initialise with a plan.

        Args:
            plan: faults of this process; None: no faults.
            kill: ends this process; default: SIGKILL.
            sleep: sleeps for the given seconds.
            clock: returns the time in seconds.
        """
        self.plan = plan or FaultPlan()
        self._kill = kill or _kill_myself
        self._sleep = sleep
        self._clock = clock

    @contextlib.contextmanager
    def during(self, step: int, model: nn.Module, *, sleep: Callable[[float], None] | None = None) -> Iterator[None]:
        """Wrap the forward and backward pass of a step.

        Kills the process on entry; on exit corrupts the gradients and waits as long as the plan delays the step.

        Args:
            step: number of the step.
            model: model whose gradients are corrupted.
            sleep: sleeps for the given seconds in this step; default: that of the constructor.
        """
        plan = self.plan
        if not plan.faults:
            yield
            return
        if plan.kills(step):
            self._kill()
        begun_s = self._clock()
        yield
        late_s = (self._clock() - begun_s) * (plan.slow_factor(step) - 1.0) + plan.delay_s(step)
        late_s += plan.num_lost(step) * RESENT_AFTER_S
        with torch.no_grad():
            plan.attack([p.grad for p in model.parameters() if p.grad is not None], step)
        if late_s > 0:
            (sleep or self._sleep)(late_s)


def without_overlap(exchange: Mapping[str, Any], faults: Sequence[Fault]) -> dict[str, Any]:
    """Return the keys of an exchange so that it sends no gradients before the faults have corrupted them.

    Raises:
        ConfigError: the exchange consumes the gradients before they can be corrupted.
    """
    if all(fault["kind"] != "byzantine" for fault in faults) or exchange.get("type", "allreduce") != "allreduce":
        return dict(exchange)
    if exchange.get("shard", "none") != "none":
        raise ConfigError(
            f"faults: byzantine workers need whole gradients, which strategy.exchange.shard: {exchange['shard']} does "
            "not keep; use shard: none."
        )
    return {**exchange, "overlap": False}


def _kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
