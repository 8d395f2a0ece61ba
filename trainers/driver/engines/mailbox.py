"""A mailbox between the driver and workers that Ray Train starts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from orchestray.platform.actors.member import Failure, Identity
from orchestray.platform.process.pulse import Sign
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.driver.engines.heartbeats import Beat
from orchestray.trainers.driver.runlog.kill_schedule import Fault, KillSchedule, described

_SETTLE_TIMEOUT_S = 120.0
"""Seconds that a worker that lost touch with the others waits for the cause."""


class Mailbox:
    """A mailbox between the workers of all attempts and the driver; an asyncio actor once `ray.remote` wraps it.

    The workers of one attempt share a name for it. Late messages of an earlier attempt are dropped.
    """

    def __init__(self, num_workers: int, faults: Sequence[Fault] = ()) -> None:
        self._num_workers = num_workers
        self._kills = KillSchedule(faults, "worker")
        self._messages: list[tuple[str, Any]] = []
        self._attempt: str | None = None
        self._silent: set[int] = set()
        """Ranks of this attempt that have answered, or lost touch with the others."""
        self._broken = False
        """True if a worker of this attempt is known to be dead."""
        self._beats: dict[int, Beat] = {}
        """Newest heartbeat of each worker of this attempt."""
        self._aborts = False
        """True if the workers of this attempt are to stop what they wait for."""
        self._moves = False
        """True if the workers are to stop with a checkpoint, and to begin again elsewhere."""
        self._over = False
        self._stop = False
        self._written_step = 0
        self._changed = asyncio.Condition()

    # -- from the workers ----------------------------------------------------------------------------------

    async def enter(self, attempt: str, rank: int, identity: Identity, node: str = "") -> bool:
        """Register a worker; return True if there is anything left to do.

        Args:
            attempt: name of the attempt.
            rank: rank of the worker.
            identity: process and node of the worker.
            node: id of that node in Ray.
        """
        if self._over:
            return False
        if attempt != self._attempt:
            self._attempt, self._silent, self._broken = attempt, set(), False
            self._beats, self._aborts = {}, False
            self._messages.append(("attempt", None))
        self._messages.append(("entered", (rank, identity, node)))
        return True

    async def num_kills_over(self) -> int:
        """Return the number of past steps at which a worker was to be killed on purpose."""
        return self._kills.num_over()

    async def describe(self, sizes: dict[str, int]) -> None:
        """Leave the sizes of the run, as reported by rank 0 (`ReplicaHost.describe`)."""
        self._messages.append(("sizes", sizes))

    async def put(self, attempt: str, lines: list[dict[str, Any]]) -> tuple[bool, int]:
        """Leave metric lines; return True if a stop was requested, and the step up to which lines are on disk."""
        if attempt == self._attempt and lines:
            self._messages.append(("lines", lines))
        return self._stop or self._moves, self._written_step

    async def beat(self, attempt: str, rank: int, *, is_built: bool, sign: Sign | None) -> bool:
        """Leave a heartbeat; return True if the worker is to stop what it waits for.

        Args:
            attempt: name of the attempt.
            rank: rank of the worker.
            is_built: True if its task and model are built.
            sign: state of its work; None: it does none.
        """
        if attempt != self._attempt:
            return True
        number = self._beats[rank].number + 1 if rank in self._beats else 1
        self._beats[rank] = Beat(number, is_built, sign)
        return self._aborts

    async def answer(self, attempt: str, rank: int, answer: Any) -> bool:
        """Leave the end of a worker: an `Outcome`, or the `Failure` that ends the run.

        Return True, once all have answered, if the worker is to begin again elsewhere.
        """
        if attempt != self._attempt:
            return False
        moves = self._moves and isinstance(answer, Outcome) and answer.ended == "interrupted"
        self._messages.append(("moved" if moves else "answer", (rank, answer)))
        self._over = self._over or isinstance(answer, Failure)
        await self._fall_silent(rank)
        if moves:  # Ray Train ends all at once, and the checkpoint may be in the making
            await self._until_explained(attempt, _SETTLE_TIMEOUT_S)
        return moves

    async def lost_touch(self, attempt: str, rank: int, timeout_s: float = _SETTLE_TIMEOUT_S) -> bool:
        """Wait until it is known why a worker lost touch with the others.

        Return True if the run is over because another worker failed. Otherwise a worker died, or all of them lost touch
        with each other.

        Args:
            attempt: name of the attempt.
            rank: rank of the worker.
            timeout_s: longest wait in seconds.
        """
        if attempt == self._attempt:
            await self._fall_silent(rank)
        await self._until_explained(attempt, timeout_s)
        return self._over

    async def _until_explained(self, attempt: str, timeout_s: float) -> None:
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._is_explained(attempt)), timeout_s)

    def _is_explained(self, attempt: str) -> bool:
        everybody = len(self._silent) == self._num_workers
        return self._over or self._broken or everybody or attempt != self._attempt

    async def _fall_silent(self, rank: int) -> None:
        self._messages.append(("silent", rank))
        async with self._changed:
            self._silent.add(rank)
            self._changed.notify_all()

    # -- from Ray Train's controller -----------------------------------------------------------------------

    async def lost(self, causes: dict[int, str]) -> None:
        """Record that workers of this attempt are dead, and that all of them will be restarted.

        Args:
            causes: causes of the deaths, by rank.
        """
        async with self._changed:
            self._broken = True
            self._changed.notify_all()
        self._messages += [("fault", described(kill)) for kill in self._kills.lost(causes)]
        self._messages.append(("lost", causes))

    # -- from the driver -----------------------------------------------------------------------------------

    async def take(self, written_step: int) -> list[tuple[str, Any]]:
        """Return the messages since the last call, in order.

        Args:
            written_step: step up to which metric lines are on disk.
        """
        self._written_step = written_step
        messages, self._messages = self._messages, []
        return messages

    async def heartbeats(self) -> dict[int, Beat]:
        """Return the newest heartbeat of each worker of this attempt, by rank."""
        return dict(self._beats)

    async def abort(self) -> None:
        """Have the workers of this attempt stop what they wait for, as all wait for each other."""
        self._aborts = True

    async def move(self) -> None:
        """Have the workers end after a common step, with a checkpoint, and begin again elsewhere."""
        self._moves = not self._stop

    async def moved(self) -> None:
        """Note that all workers have ended for a move."""
        self._moves = False

    async def stop(self) -> None:
        """Have the workers end after a common step, with a checkpoint."""
        self._stop, self._moves = True, False

    async def end(self) -> None:
        """Stop the workers, and give those that enter later nothing to do."""
        async with self._changed:
            self._stop = self._over = True
            self._changed.notify_all()
