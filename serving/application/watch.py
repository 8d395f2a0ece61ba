"""The watch on new versions after a change: the old ones stay warm, and take over again if the new ones fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from orchestray.serving.config.schema import RollbackSection
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.routing.endpoint import ModelVersion
from orchestray.serving.routing.rollback import Verdict

_log = logging.getLogger("orchestray.serving")

_LOOK_S = 0.25


class Watch:
    """A watch on new versions for `rollback.watch_s` seconds, in a task of the running loop.

    Args:
        versions: the new versions.
        rollback: bounds on their answers.
        monitor: reports the answers.
        go_back: called with the version that broke a bound, and how, as a clause.
        is_over: called if none did.
    """

    def __init__(
        self,
        versions: Sequence[ModelVersion],
        rollback: RollbackSection,
        monitor: Monitor,
        go_back: Callable[[ModelVersion, str], Awaitable[None]],
        is_over: Callable[[], Awaitable[None]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._until_s = self._loop.time() + rollback.watch_s
        self._monitor, self._go_back, self._is_over = monitor, go_back, is_over
        self._verdicts = {
            (version.name, version.version): (
                version,
                Verdict(self._loop.time(), error_rate=rollback.error_rate, p99_ms=rollback.p99_ms),
            )
            for version in versions
        }
        self._num_steps: dict[ModelVersion, int] = {}
        """Steps that each generator had made at the last look: a long answer is not silence."""
        monitor.on_answer = self._answered
        self._task = self._loop.create_task(self._run())

    def end(self) -> list[ModelVersion]:
        """End the watch without a judgement; return the new versions."""
        self._monitor.on_answer = None
        if self._task is not asyncio.current_task():  # a judgement has more to do after this
            self._task.cancel()
        return [version for version, _ in self._verdicts.values()]

    def _answered(self, model: str, version: str, status: int, seconds: float) -> None:
        if (found := self._verdicts.get((model, version))) is not None:
            self._look_for_replicas(*found)
            found[1].answered(self._loop.time(), status, seconds)

    def _look_for_replicas(self, version: ModelVersion, verdict: Verdict) -> None:
        if version.rests and version.batcher.is_starting:  # it has scaled to zero, as it may
            verdict.starts(self._loop.time())

    async def _run(self) -> None:
        while self._loop.time() < self._until_s:
            await asyncio.sleep(_LOOK_S)
            for version, verdict in self._verdicts.values():
                self._look_for_replicas(version, verdict)
                reason = verdict.reason(self._loop.time(), self._num_pending(version, verdict))
                if reason is not None:
                    await self._go_back(version, reason)
                    return
        await self._is_over()

    def _num_pending(self, version: ModelVersion, verdict: Verdict) -> int:
        """Return the number of a version's requests that wait or run; tokens since the last look are signs of life."""
        stats = version.batcher.stats
        num_pending = stats.num_queued + stats.num_in_flight
        if version.generator is not None:
            generated = version.generator.stats
            num_pending += generated.num_waiting + generated.num_running
            if generated.num_steps != self._num_steps.get(version):
                self._num_steps[version] = generated.num_steps
                verdict.lives(self._loop.time())
        return num_pending
