"""A replica under Ray Serve, which places it, restarts it, and decides on the number of replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.replicas.in_process import BatchModel
from orchestray.serving.replicas.replica import FrontAddress, ReplicaWorker, report_failure
from orchestray.serving.replicas.shared_replica import SharedReplicaWorker


@dataclass(frozen=True)
class ReplicaSettings:
    """The settings of a replica. Picklable."""

    front: FrontAddress
    load: dict[str, Any]
    """Arguments of `load_served_model`."""
    run_timeout_s: float | None
    """Seconds after which a batch is considered hung."""
    shared: bool = False
    """True if `front` is the directory of several fronts."""


class Replica:
    """The deployment's class without the methods that Ray Serve calls. Independent of Ray.

    Args:
        settings: settings of the replica.
        name: its name at the front.
        end: called in a thread when the front is gone, to end the application on the cluster; nothing else would.
    """

    def __init__(self, settings: ReplicaSettings, name: str, end: Callable[[], None]) -> None:
        self._settings = settings
        self._name = name
        self._end = end
        self._worker: ReplicaWorker | SharedReplicaWorker | None = None
        self._serving: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Load the model and warm it up.

        Raises:
            OrchestrayError: it cannot be served.
        """
        from orchestray.serving.models.load import load_served_model  # torch: late

        try:
            model = await asyncio.to_thread(load_served_model, **self._settings.load)
        except OrchestrayError as error:
            await report_failure(self._settings.front, error)
            raise
        self.host(model)

    def host(self, model: BatchModel) -> None:
        """Use this model, loaded and warm, for the batches to come."""
        kind = SharedReplicaWorker if self._settings.shared else ReplicaWorker
        self._worker = kind(self._settings.front, model, self._name)

    def report(self) -> None:
        """Start to take batches from the front."""
        if self._worker is not None and self._serving is None:
            self._serving = asyncio.create_task(self._serve(self._worker))

    async def _serve(self, worker: ReplicaWorker | SharedReplicaWorker) -> None:
        if not await worker.serve():
            await asyncio.to_thread(self._end)

    async def leave(self) -> None:
        """Answer the current batch, and take no more."""
        if self._worker is not None and self._serving is not None:
            await self._worker.leave()

    async def check_health(self) -> None:
        """Check the replica's health for Serve, and report to the front at the first call.

        Serve replaces a replica that raises here. Between the constructor and the first check, Serve collects the
        garbage of imports. A batch in that time would be delayed by a tenth of a second.

        Raises:
            RuntimeError: a batch hangs, or the front is gone.
        """
        if self._worker is None:
            return
        self.report()
        if self._worker.ended.is_set():
            raise RuntimeError("the connection to the front has ended")
        if self._settings.run_timeout_s is not None and self._worker.busy_s > self._settings.run_timeout_s:
            raise RuntimeError(f"a batch has run for {self._worker.busy_s:.1f} s")


class ServedReplica(Replica):
    """A `Replica` with the methods that Ray Serve calls by name."""

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]
        Replica.__init__(self, settings, _name(), end_application)
        await self.load()

    async def __del__(self) -> None:
        """Leave, in Serve's last call before it ends the process."""
        await self.leave()

    async def __call__(self) -> str:
        """Return the replica's name; requests do not come this way."""
        return _name()


def end_application() -> None:
    """End the application that this process is part of."""
    from ray import serve

    serve.delete(serve.get_replica_context().app_name, _blocking=False)


def _name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
