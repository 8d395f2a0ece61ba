"""One live actor of a gang: who it is, where it sits, whether it lives."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.platform.gang.member import Identity
    from orchestray.platform.gang.placement import Place

_FLUSH_TIMEOUT_S = 0.5


@dataclass
class Seat:
    """One live actor of a gang, and where it sits."""

    actor: Any
    place: Place
    identifying: Any
    """Ray reference of its identity, asked for when it was started."""
    made_s: float = field(default_factory=time.monotonic)
    """When it was asked for."""
    hosting: Any = None
    """Ray reference of what building its object said, where it was told to when it was started."""
    identity: Identity | None = None
    met: bool = False
    """Whether it has joined a generation: its imports are done."""
    end: Any = None
    """Of a seat that waits for its turn: a Ray reference that is ready once the actor is dead."""
    placed_s: float | None = None
    """Since when its place is known to be there, of one that has been silent for long."""
    killed_because: str | None = None
    """Why it had to be ended."""

    def answered(self) -> Identity | None:
        """Its identity, if it has answered; does not wait."""
        if self.identity is None and ray.wait([self.identifying], timeout=0)[0]:
            with contextlib.suppress(RayError):
                self.identity = ray.get(self.identifying)
        return self.identity

    @property
    def is_silent(self) -> bool:
        """Whether it neither has answered nor is known to be dead; does not wait."""
        return self.answered() is None and not ray.wait([self.identifying], timeout=0)[0]

    def kill_if_late(self, now_s: float, timeout_s: float) -> None:
        """To be called while it is silent and its place is there: after so long it does not come any more."""
        self.placed_s = self.placed_s or now_s
        if now_s - self.placed_s >= timeout_s:
            self.killed_because = f"it did not start within {timeout_s:g} s"
            self.kill()

    def kill(self) -> None:
        """End the process, if there is one."""
        with contextlib.suppress(RayError):
            ray.kill(self.actor)

    @property
    def is_dead(self) -> bool:
        """Of a seat that waits for its turn; does not wait."""
        return self.end is not None and bool(ray.wait([self.end], timeout=0)[0])


def end(actors: Sequence[Any]) -> None:
    """End their processes."""
    with contextlib.suppress(Exception):
        references = [beside(actor.flush).remote() for actor in actors]
        ray.wait(references, num_returns=len(references), timeout=_FLUSH_TIMEOUT_S)
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)


def waiting(seat: Seat) -> Seat:
    """The seat, watched for its death while it waits for its turn."""
    seat.end = beside(seat.actor.linger).remote()
    return seat


def beside(method: Any) -> Any:
    """The actor method, run beside the member's working thread and not behind what queues for it."""
    return method.options(concurrency_group="control")
