"""A replica as Ray Serve hosts it: Serve says where it runs, restarts it, and how many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.deployments.replica import FrontAddress, ReplicaWorker, report_failure
from orchestray.serving.deployments.shared_replica import SharedReplicaWorker
from orchestray.serving.models.in_process import BatchModel


@dataclass(frozen=True)
class ReplicaSettings:
    """All that a replica is told. Picklable."""

    front: FrontAddress
    load: dict[str, Any]
    """Arguments of `load_served_model`."""
    run_timeout_s: float | None
    """Seconds after which a batch is taken to hang."""
    shared: bool = False
    """Whether `front` is the directory of several fronts."""


class Replica:
    """The deployment's class, before the methods that Ray Serve calls. Knows nothing of Ray.

    Args:
        settings: all that it is told.
        name: what it is called where it reports.
        end: is called in a thread when the front is gone: nobody else would end what it has started on the cluster.
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
        """Have this model, loaded and warm, run the batches to come."""
        kind = SharedReplicaWorker if self._settings.shared else ReplicaWorker
        self._worker = kind(self._settings.front, model, self._name)

    def report(self) -> None:
        """Take batches from the front from now on."""
        if self._worker is not None and self._serving is None:
            self._serving = asyncio.create_task(self._serve(self._worker))

    async def _serve(self, worker: ReplicaWorker | SharedReplicaWorker) -> None:
        if not await worker.serve():
            await asyncio.to_thread(self._end)

    async def leave(self) -> None:
        """Answer what runs, and take nothing more."""
        if self._worker is not None and self._serving is not None:
            await self._worker.leave()

    async def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that raises here; reports to the front when asked first.

        Between the constructor and that, Serve collects what imports have left: a batch that came then would wait for
        a tenth of a second, with all who are in it.

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
    """`Replica` with the methods that Ray Serve calls by their names."""

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]
        Replica.__init__(self, settings, _name(), end_application)
        await self.load()

    async def __del__(self) -> None:
        """Serve's last call, before it ends the process."""
        await self.leave()

    async def __call__(self) -> str:
        """Whether it is there: nobody sends it requests this way."""
        return _name()


def end_application() -> None:
    """End the application that this process is part of."""
    from ray import serve

    serve.delete(serve.get_replica_context().app_name, _blocking=False)


def _name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
