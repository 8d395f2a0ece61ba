"""A front as Ray Serve hosts it: an HTTP application behind Serve's proxy, with the queues of all versions."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

from orchestray.platform.config.serving.schema import ModelSection, ServeConfig
from orchestray.platform.errors import OrchestrayError
from orchestray.serving.batching import BatchListener
from orchestray.serving.deployments.directory import Directory
from orchestray.serving.deployments.live import LiveEndpoint
from orchestray.serving.deployments.membership import Agree, Membership
from orchestray.serving.deployments.pool import ReplicaPool
from orchestray.serving.deployments.replica import FrontAddress
from orchestray.serving.deployments.versions import ListenerOf, make_batcher
from orchestray.serving.http import HttpSettings, Tokens
from orchestray.serving.http.auth import Token
from orchestray.serving.models.endpoint import ModelVersion


class SharedStarter:
    """Starts nothing: the replicas of a version, which other fronts share, come to the pool by themselves.

    Args:
        pool: where they come.
        listener_of: who is told of the batches here.
    """

    def __init__(self, pool: ReplicaPool, listener_of: ListenerOf) -> None:
        self._pool = pool
        self._listener_of = listener_of
        self.groups: dict[tuple[str, int], str] = {}
        """By a model's name and version: what its replicas call themselves."""

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        listener = self._listener_of(model.name, str(model.version))
        batcher = make_batcher(config.batching, listener)
        return await self._pool.version(self.groups[model.name, model.version], batcher, _nothing, listener)

    def content(self, model: ModelSection) -> str:
        return self.groups[model.name, model.version]  # other replicas, another version

    @property
    def address(self) -> str | None:
        return None

    def move(self, address: str | None) -> bool:
        return False  # this process is on one

    async def close(self) -> None:
        await self._pool.close()


class _AgreeingEndpoint(LiveEndpoint):
    """What a front serves: a change is prepared, and holds when every front could do that."""

    agree: Agree

    async def _before_change(self, config: ServeConfig, settings: HttpSettings, versions: list[ModelVersion]) -> None:
        await self.agree()


class Front:
    """A front, as a member of a directory; an ASGI application once it has joined. Knows nothing of Ray."""

    def __init__(self, directory: FrontAddress) -> None:
        self._directory = directory
        self._pool = ReplicaPool(directory.secret)
        self._starter = SharedStarter(self._pool, lambda *_: BatchListener())
        self._live: _AgreeingEndpoint | None = None
        self._member: Membership | None = None
        self._name = ""
        """In metrics: no other front has it."""

    @property
    def app(self) -> LiveEndpoint:
        assert self._live is not None, "it has joined"
        return self._live

    async def join(self, host: str) -> None:
        """Take over what is served; requests can be answered when a replica has come.

        Args:
            host: address of this machine for the replicas.

        Raises:
            OSError, EOFError: the endpoint has ended.
            OrchestrayError: what is served cannot be served here.
        """
        port = await self._pool.listen(host)
        self._name = f"{host}:{port}"
        self._member = await Directory.join(self._directory, (host, port), self._apply)

    async def ended(self) -> None:
        """Wait until the endpoint has ended."""
        assert self._member is not None, "it has joined"
        await self._member.ended.wait()

    async def leave(self) -> None:
        """Answer what waits, and end."""
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
        """Serve's last call, before it ends the process."""
        self._watching.cancel()
        await self._front.leave()

    async def _watch(self) -> None:
        """Where the endpoint has ended, nobody else would end what it has started on the cluster."""
        from orchestray.serving.deployments.ray_replica import end_application

        await self._front.ended()
        await asyncio.to_thread(end_application)


def settings_to_json(settings: HttpSettings) -> dict[str, Any]:
    """What fronts need of it; the tokens are hashes."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {**given, "tokens": [[token.digest, token.name, token.rate_limit_per_s] for token in settings.tokens]}


def settings_from(data: dict[str, Any]) -> HttpSettings:
    """What `settings_to_json` was given."""
    return HttpSettings(**{**data, "tokens": Tokens([Token(*token) for token in data["tokens"]])})


async def _nothing() -> None:
    """The replicas are ended by who started them."""
