"""A front under Ray Serve: an HTTP application behind Serve's proxy, with the queues of all versions."""

from __future__ import annotations

import asyncio
from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.batching import BatchListener
from orchestray.serving.config.schema import ModelSection, ServeConfig
from orchestray.serving.http import HttpSettings
from orchestray.serving.http.settings import settings_from
from orchestray.serving.replicas.batchers import ListenerOf, make_batcher
from orchestray.serving.replicas.directory import Directory
from orchestray.serving.replicas.membership import Agree, Membership
from orchestray.serving.replicas.pool import ReplicaPool
from orchestray.serving.replicas.replica import FrontAddress
from orchestray.serving.routing.endpoint import ModelVersion


class SharedStarter:
    """A starter that starts nothing: replicas, which are shared with other fronts, connect to the pool themselves.

    Args:
        pool: pool to which they connect.
        listener_of: returns the listener of a version's batches in this front.
    """

    def __init__(self, pool: ReplicaPool, listener_of: ListenerOf) -> None:
        self._pool = pool
        self._listener_of = listener_of
        self.groups: dict[tuple[str, int], str] = {}
        """Maps a model's name and version to the group name of its replicas."""

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        listener = self._listener_of(model.name, str(model.version))
        batcher = make_batcher(config.batching, listener)
        return await self._pool.version(self.groups[model.name, model.version], batcher, _nothing, listener)

    def content(self, model: ModelSection) -> str:
        return self.groups[model.name, model.version]  # other replicas mean another version

    @property
    def address(self) -> str | None:
        return None

    def move(self, address: str | None) -> bool:
        return False  # this process belongs to one

    async def close(self) -> None:
        await self._pool.close()


class _AgreeingEndpoint(LiveEndpoint):
    """The endpoint of a front: a change is prepared, and made when every front has prepared it."""

    agree: Agree

    async def _before_change(self, config: ServeConfig, settings: HttpSettings, versions: list[ModelVersion]) -> None:
        await self.agree()


class Front:
    """A front that is a member of a directory; an ASGI application once it has joined. Independent of Ray."""

    def __init__(self, directory: FrontAddress) -> None:
        self._directory = directory
        self._pool = ReplicaPool(directory.secret)
        self._starter = SharedStarter(self._pool, lambda *_: BatchListener())
        self._live: _AgreeingEndpoint | None = None
        self._member: Membership | None = None
        self._name = ""
        """Name in metrics, unique among the fronts."""

    @property
    def app(self) -> LiveEndpoint:
        assert self._live is not None, "it has joined"
        return self._live

    async def join(self, host: str) -> None:
        """Take over the current state; requests can be answered when a replica has connected.

        Args:
            host: address of this machine for the replicas.

        Raises:
            OSError, EOFError: the endpoint has ended.
            OrchestrayError: the current state cannot be served here.
        """
        port = await self._pool.listen(host)
        self._name = f"{host}:{port}"
        self._member = await Directory.join(self._directory, (host, port), self._apply)

    async def ended(self) -> None:
        """Wait until the endpoint has ended."""
        assert self._member is not None, "it has joined"
        await self._member.ended.wait()

    async def leave(self) -> None:
        """Answer waiting requests, and end."""
        if self._live is not None:
            self._live.prepare_to_end()
            await self._live.close()
        if self._member is not None:
            self._member.close()

    async def _apply(self, change: dict[str, Any], agree: Agree) -> None:
        config = ServeConfig.model_validate(change["config"])
        settings = settings_from(change["settings"])
        groups = {(name, version): group for name, version, group in change["groups"]}
        if self._live is None:
            live = _AgreeingEndpoint(config, settings=settings, make_starter=self._make_starter)
            live.agree = agree
            live.monitor.labels = {"front": self._name}
            self._starter.groups = groups
            await live.start()
            self._live = live
        else:
            self._starter.groups = groups
            await self._live.take_over(config, settings)
            await self._live.drained()

    def _make_starter(self, listener_of: ListenerOf) -> SharedStarter:
        self._starter = SharedStarter(self._pool, listener_of)
        return self._starter


class ServedFront:
    """The deployment's class, before `serve.ingress`."""

    async def __init__(self, directory: FrontAddress) -> None:  # type: ignore[misc]
        import ray

        self._front = Front(directory)
        try:
            await self._front.join(ray.util.get_node_ip_address())
        except (OSError, EOFError) as error:
            raise OrchestrayError("the endpoint has ended") from error
        self._watching = asyncio.create_task(self._watch())

    def __serve_build_asgi_app__(self) -> LiveEndpoint:
        return self._front.app

    async def __del__(self) -> None:
        """Leave, in Serve's last call before it ends the process."""
        self._watching.cancel()
        await self._front.leave()

    async def _watch(self) -> None:
        """End the application on the cluster after the endpoint has ended; nothing else would."""
        from orchestray.serving.replicas.ray_replica import end_application

        await self._front.ended()
        await asyncio.to_thread(end_application)


async def _nothing() -> None:
    """Do nothing: the process that started the replicas ends them."""
