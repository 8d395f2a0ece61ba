"""A replica of a model as a deployment of Ray Serve, to which the ingress sends whole batches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from orchestray.serving.application.batch_channel import BatchServer, Door, announce, doors_of
from orchestray.serving.replicas.batch_thread import BatchThread


class ModelReplica:
    """A model in a process of its own. Ray Serve places, restarts and scales it."""

    async def __init__(self, load: Mapping[str, Any], run_timeout_s: float | None) -> None:  # type: ignore[misc]
        """Load the model and warm it up.

        Args:
            load: arguments of `load_served_model`.
            run_timeout_s: seconds after which a batch is considered hung; None: never.

        Raises:
            OrchestrayError: it cannot be served.
        """
        import ray
        from ray import serve

        from orchestray.serving.models.device import limit_memory  # torch: late
        from orchestray.serving.models.load import load_served_model  # as above

        await asyncio.to_thread(limit_memory, load["gpus"])  # this process has one model and its share alone
        self._run_timeout_s = run_timeout_s
        self._model = await asyncio.to_thread(load_served_model, **load)
        self._thread = BatchThread(self._model)
        self._server = BatchServer(self._thread, self._model.signature, self._leave)
        context, host = serve.get_replica_context(), ray.util.get_node_ip_address()
        door = Door(
            place=doors_of(context.app_name, context.deployment),
            replica=context.replica_id.unique_id,
            host=host,
            port=await self._server.start(host),
            key=self._server.key,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
        )
        self._announcing = asyncio.create_task(announce(door))
        self._leaving: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Check the replica's health for Serve, which replaces one that raises here.

        Raises:
            RuntimeError: a batch hangs, or the replica was asked to end.
        """
        if self._leaving is not None:
            raise RuntimeError("it was asked to end")
        if self._run_timeout_s is not None and self._thread.busy_s > self._run_timeout_s:
            raise RuntimeError(f"a batch has run for {self._thread.busy_s:.1f} s")

    async def __del__(self) -> None:
        """Answer the batches that have come, in Serve's last call before it ends the process."""
        if hasattr(self, "_announcing"):
            await self._end()

    def _leave(self) -> None:
        """Answer the batches that have come, and have Serve put another replica in this one's place."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._end())

    async def _end(self) -> None:
        self._announcing.cancel()
        await asyncio.wait([self._announcing])
        await self._server.close()
