"""The state of one live actor of a gang: its identity, its place, and its liveness."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import RayError

from orchestray.platform.actors.death_cause import LOSSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.platform.actors.member import Identity
    from orchestray.platform.actors.placement import Place
    from orchestray.platform.process.pulse import Sign

_FLUSH_TIMEOUT_S = 0.5
_PING_INTERVAL_S = 2.0
_UNHEARD_S = 3.0
"""Seconds after which a dead member's calls have ended: usually they do within a tenth of one."""
SILENT_S = 5.0
"""Seconds without an answer after which a member counts as silent: usually it takes a thousandth of one."""
_TIMES_A_SHARE = 10.0
_TIMES_TO_BUILD = 5.0
"""Factor on the patience with a member that builds its object: imports and data may hold Python's lock for long."""


@dataclass(frozen=True)
class Patience:
    """The patience with members that do not answer, or that make no progress."""

    hang_s: float | None = None
    """Seconds for which a member may not answer; None: for ever."""
    stall_s: float | None = None
    """Seconds for which a member at work may make no progress, unless ten of its shares take longer; None: for ever."""
    report_s: float | None = None
    """Seconds without a step after which that is reported, unless ten steps take longer; None: never."""

    @property
    def ping_interval_s(self) -> float:
        """Seconds between two questions to a member."""
        return min(_PING_INTERVAL_S, (self.hang_s or math.inf) / 4, (self.stall_s or math.inf) / 4)

    def is_over(self, sign: Sign) -> bool:
        """Return True if a member has made no progress for too long."""
        return self.stall_s is not None and sign.quiet_s >= max(self.stall_s, _TIMES_A_SHARE * sign.share_s)

    def why_silent(self, silent_s: float, *, is_built: bool) -> str | None:
        """Return the reason to kill a process that has not answered for this time; None: it may still do so.

        Args:
            silent_s: seconds without an answer.
            is_built: True if its object is built; before, it has more time.
        """
        hang_s = (self.hang_s or math.inf) * (1.0 if is_built else _TIMES_TO_BUILD)
        return f"it did not answer for {hang_s:g} s: it was stopped, or starved" if silent_s >= hang_s else None

    def why_stuck(self, sign: Sign | None) -> str | None:
        """Return the reason to kill a process that gives this sign; None if it goes on, or waits for others."""
        if sign is None or sign.is_waiting or not self.is_over(sign):
            return None
        return f"it made no progress for {sign.quiet_s:.3g} s, and waited for no other process"


@dataclass(frozen=True)
class State:
    """The state of a member, as far as it is known from here."""

    kind: Literal["starting", "building", "silent", "working", "waiting", "idle"]
    """`silent`: it does not answer; `waiting`: for other processes; `idle`: it has nothing to do."""
    for_s: float
    """Seconds for which it has been so; of one that works or waits: without progress."""


@dataclass
class MemberSlot:
    """One live actor of a gang and its place."""

    actor: Any
    place: Place
    identifying: Any
    """Ray reference of its identity, requested when it was started."""
    made_s: float = field(default_factory=time.monotonic)
    """Time at which its start was requested."""
    hosting: Any = None
    """Ray reference of the result of building its object, if that was requested at the start."""
    identity: Identity | None = None
    met: bool = False
    """True if it has joined a generation, so its imports are done."""
    end: Any = None
    """Ray reference that becomes ready once the actor is dead; set by `waiting`."""
    placed_s: float | None = None
    """Time since which its place is known to be ready, for a member that has been silent for long."""
    killed_because: str | None = None
    """Reason for which it was killed."""
    sign: Sign | None = None
    """State of its work, as it answered last."""
    death: RayError | None = None
    """Error by which Ray has answered a question, since it is dead."""
    _ping: Any = None
    """Ray reference of a question that it has not answered yet."""
    _pinged_s: float = 0.0
    """Time of the last question."""
    _is_built: bool = False

    def answered(self) -> Identity | None:
        """Return its identity if it has answered; do not wait."""
        if self.identity is None and ray.wait([self.identifying], timeout=0)[0]:
            with contextlib.suppress(RayError):
                self.identity = ray.get(self.identifying)
        return self.identity

    @property
    def is_silent(self) -> bool:
        """True if it has not answered and is not known to be dead; does not wait."""
        return self.answered() is None and not ray.wait([self.identifying], timeout=0)[0]

    def kill_if_late(self, now_s: float, timeout_s: float) -> None:
        """Kill it if its place has been ready for `timeout_s` seconds; call this only while it is silent."""
        self.placed_s = self.placed_s or now_s
        if now_s - self.placed_s >= timeout_s:
            self.killed_because = f"it did not start within {timeout_s:g} s"
            self.kill()

    def trouble(self, now_s: float, patience: Patience) -> str | None:
        """Ask it for a sign of its work; return the reason to kill it, or None. Call this repeatedly.

        Any thread of its process answers. So it is silent if the process is stopped, starved, or holds Python's lock.
        One that answers may still be stuck: it makes no progress, and waits for no other process.
        """
        if self.death is not None or self.answered() is None:
            return None
        self._is_built = self._is_built or (self.hosting is not None and bool(ray.wait([self.hosting], timeout=0)[0]))
        if self._ping is None:
            if now_s - self._pinged_s >= patience.ping_interval_s:
                self._ping, self._pinged_s = beside(self.actor.look).remote(), now_s
        elif ray.wait([self._ping], timeout=0)[0]:
            self._hear(self._ping)
            self._ping = None
            return patience.why_stuck(self.sign) if self.killed_because is None else None
        elif self.killed_because is None:
            return patience.why_silent(now_s - self._pinged_s, is_built=self._is_built)
        return None

    def state(self, now_s: float) -> State | None:
        """Return its state; None if it is dead. Without `trouble`, which asks it, the state grows old."""
        if self.death is not None or self.killed_because is not None:
            return None
        if self.answered() is None:
            return State("starting", now_s - self.made_s)
        if self._ping is not None and now_s - self._pinged_s >= SILENT_S and not ray.wait([self._ping], timeout=0)[0]:
            return State("silent", now_s - self._pinged_s)
        if self.sign is None:
            return State("idle" if self._is_built else "building", now_s - self.made_s)
        return State("waiting" if self.sign.is_waiting else "working", self.sign.quiet_s)

    def _hear(self, ping: Any) -> None:
        """Take the answer to a question, or note that it is dead."""
        try:
            self.sign = ray.get(ping)
        except LOSSES as error:
            self.death = error
        except RayError:
            return  # the node could not deliver the answer: its work tells more

    def is_unheard(self, now_s: float) -> bool:
        """Return True if it has been dead for so long that all calls to it should have ended."""
        return self.death is not None and now_s - self._pinged_s >= _UNHEARD_S

    def forget_sign(self) -> None:
        """Forget the state of earlier work, also if it is still to be answered."""
        self.sign = self._ping = None

    def kill(self) -> None:
        """End the process, if there is one."""
        with contextlib.suppress(RayError):
            ray.kill(self.actor)

    @property
    def is_dead(self) -> bool:
        """True if the actor is known to be dead; does not wait. Always False before `waiting` was called."""
        return self.end is not None and bool(ray.wait([self.end], timeout=0)[0])


def end(actors: Sequence[Any]) -> None:
    """Flush the output of these actors and end their processes."""
    with contextlib.suppress(Exception):
        references = [beside(actor.flush).remote() for actor in actors]
        ray.wait(references, num_returns=len(references), timeout=_FLUSH_TIMEOUT_S)
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)


def waiting(slot: MemberSlot) -> MemberSlot:
    """Begin to watch a slot for the death of its actor, and return the slot."""
    slot.end = beside(slot.actor.linger).remote()
    return slot


def beside(method: Any) -> Any:
    """Return the actor method set to run beside the member's working thread, so that it does not queue behind it."""
    return method.options(concurrency_group="control")
