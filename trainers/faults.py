"""Things that go wrong on purpose: which, decided purely, and the one place that does them.

For chaos tests, and to see what a scheme withstands (the config's `faults` section).
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
"""After so long a lost message is sent again: the least that TCP waits on Linux."""
_MOST_LOST = 100

Fault = Mapping[str, Any]
"""kind, role, rank, at_step, factor, attack, scale."""


@dataclass(frozen=True)
class FaultPlan:
    """What goes wrong in one process: pure decisions, the same whenever they are asked for."""

    faults: tuple[Fault, ...] = ()
    """Of this process."""
    kill_steps: tuple[int, ...] = ()
    """Those of this process that belong to this attempt."""
    seed: Sequence[int] = field(default=(0, 0))
    """What random decisions depend on, beside the step."""

    @classmethod
    def of(
        cls, faults: Sequence[Fault], role: str, rank: int, *, attempt: int = 0, is_alone: bool = False, seed: int = 0
    ) -> FaultPlan:
        """The plan of the process `role`/`rank`.

        Args:
            faults: all of the run.
            role: of the process.
            rank: of the process.
            attempt: how many of the steps at which somebody is killed are over (`kills.Kills.num_over`): a process that
                has been killed must not be killed again when the step is repeated. The n-th such step belongs to
                attempt n, from 0.
            is_alone: this process is replaced by itself, so the attempts are its own; else every kill of its role ends
                an attempt of all.
            seed: of the run.
        """
        own = tuple(fault for fault in faults if (fault["role"], fault["rank"]) == (role, rank))
        among = own if is_alone else [fault for fault in faults if fault["role"] == role]
        steps = sorted({fault["at_step"] for fault in among if fault["kind"] == "kill"})
        due = steps[attempt : attempt + 1]
        kills = tuple(fault["at_step"] for fault in own if fault["kind"] == "kill" and fault["at_step"] in due)
        return cls(own, kills, (seed, rank))

    def kills(self, step: int) -> bool:
        """Whether the process is killed in this step."""
        return step in self.kill_steps

    def slow_factor(self, step: int) -> float:
        """How many times as long as it needs the process takes to compute; 1 or more."""
        slow = self._latest("slow", step)
        return 1.0 if slow is None else max(1.0, float(slow["factor"]))

    def delay_s(self, step: int) -> float:
        """For how long each of its messages is held back."""
        delay = self._latest("delay", step)
        return 0.0 if delay is None else float(delay["factor"])

    def drops(self, step: int, attempt: int) -> bool:
        """Whether a message is lost on the way.

        Args:
            step: it belongs to.
            attempt: a number of this sending of it; each is drawn anew.
        """
        drop = self._latest("drop", step)
        return drop is not None and float(self._draws(step, attempt).random()) < float(drop["factor"])

    def num_lost(self, step: int) -> int:
        """How often the message of a step is lost before it arrives."""
        attempt = 0
        while attempt < _MOST_LOST and self.drops(step, attempt):
            attempt += 1
        return attempt

    def attacks(self, step: int) -> bool:
        """Whether it sends wrong gradients."""
        return self._latest("byzantine", step) is not None

    def attack(self, gradients: Sequence[Tensor], step: int, generator: torch.Generator | None = None) -> None:
        """Overwrite the gradients, in place, by what an attacker sends.

        `sign_flip`: the opposite, `scale` times as large; `gaussian`: noise of standard deviation `scale`;
        `same_value`: `scale` everywhere. Nothing where it does not attack.

        Args:
            gradients: of this worker.
            step: they belong to.
            generator: of the noise; default: one of this process and step.
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
        """Of the faults of a kind that have begun, the one that began last."""
        begun = [fault for fault in self.faults if fault["kind"] == kind and fault["at_step"] <= step]
        return max(begun, key=lambda fault: int(fault["at_step"]), default=None)

    def _draws(self, step: int, number: int) -> np.random.Generator:
        return np.random.default_rng([*(part % 2**64 for part in self.seed), step, number])


class Faults:
    """Does what a plan says, around the computing of a step."""

    def __init__(
        self,
        plan: FaultPlan | None = None,
        *,
        kill: Callable[[], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            plan: of this process; None: nothing goes wrong.
            kill: ends this process; default: SIGKILL.
            sleep: for so many seconds.
            clock: tells seconds.
        """
        self.plan = plan or FaultPlan()
        self._kill = kill or _kill_myself
        self._sleep = sleep
        self._clock = clock

    @contextlib.contextmanager
    def during(self, step: int, model: nn.Module) -> Iterator[None]:
        """Around forward and backward of a step: kill at its beginning; afterwards spoil the gradients, and be late."""
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
            self._sleep(late_s)


def held_back(exchange: Mapping[str, Any], faults: Sequence[Fault]) -> dict[str, Any]:
    """The keys of an exchange for a run with these faults: gradients that are to be spoiled are not sent before.

    Raises:
        ConfigError: the exchange takes the gradients away before they can be spoiled.
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
