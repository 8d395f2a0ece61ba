"""A running endpoint: the models of its config, and the takeover of a new config between two requests."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.platform.process.sockets import is_local
from orchestray.serving.application.changes import (
    VersionKey,
    describe_generation,
    describe_requests,
    describe_versions,
    keep_fixed,
    key_of,
    refuse_unsaid_opening,
    release,
    sections_of,
    stand_in,
)
from orchestray.serving.application.model_loader import Starters
from orchestray.serving.application.watch import Watch
from orchestray.serving.config.schema import ModelSection, Scaling, ServeConfig
from orchestray.serving.generation.metrics import GenerationMetrics
from orchestray.serving.generation.router import make_generate_router
from orchestray.serving.http import HttpSettings, Monitor, Tokens, log_access_to, make_app
from orchestray.serving.http.overload.shedding import LoadShedder
from orchestray.serving.http.tracing import Spans
from orchestray.serving.replicas.batchers import ListenerOf
from orchestray.serving.routing.endpoint import ModelVersion, Share
from orchestray.serving.routing.registry import Registry

_log = logging.getLogger("orchestray.serving")

DRAIN_S = 30.0
"""Seconds that running requests have at the end."""
_OF_VERSIONS = ("models", "batching", "replicas", "resources", "compute")
"""Keys of the config that a rollback sets back."""


class LiveEndpoint:
    """The models of an endpoint and its ASGI application (`self`), which changes with the config.

    It belongs to one event loop.

    Args:
        config: config of the endpoint.
        settings: settings of the HTTP side; default: those of the config.
        make_starters: makes the starter of versions, given the function that returns listeners.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        settings: HttpSettings | None = None,
        make_starters: Callable[[ListenerOf], Starters] = Starters,
    ) -> None:
        self.config = config
        self.registry = Registry()
        self.monitor = Monitor()
        self._starters = make_starters(self.monitor.listener)
        self._versions: dict[VersionKey, ModelVersion] = {}
        self._before: tuple[ServeConfig, dict[VersionKey, ModelVersion]] | None = None
        """Config and versions before the last change, while new versions are watched."""
        self._watch: Watch | None = None
        self._turn = asyncio.Lock()
        self._taken_back: str | None = None
        self.settle: Callable[[], None] = lambda: None
        """Called when versions have come, and those that went have answered their requests."""
        self.on_rollback: Callable[[], Awaitable[None]] | None = None
        """Called when the endpoint has gone back to the models before the last change."""
        self._ending: dict[asyncio.Task[None], ModelVersion] = {}
        self._settings = settings or settings_of(config)
        self.monitor.registry.register(GenerationMetrics(self.registry))
        self._spans: Spans | None = None
        self._app = self._make_app(self._settings, config)
        self.shedding = LoadShedder(self.monitor, self._settings, self.registry)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer an ASGI request with the current application."""
        await self.shedding(self._app, scope, receive, send)

    async def start(self) -> None:
        """Load and warm up all models.

        Raises:
            OrchestrayError: a model cannot be served.
        """
        await self._change(self.config)

    async def apply(self, data: dict[str, Any], *, settings: HttpSettings | None = None) -> str:
        """Take over a changed config: new models are loaded and warm before a request reaches them.

        Running requests are answered by the versions that they reached.

        Args:
            data: plain data of the config.
            settings: settings of the HTTP side; default: those of the config.

        Returns:
            the changes, in a sentence.

        Raises:
            ConfigError: the config is wrong.
            OrchestrayError: a model cannot be served. Nothing has changed then.
        """
        config, clauses = keep_fixed(self.config, data)
        before, was, taken_back = set(self._versions), self.config.traffic(), self._taken_back
        settings = settings or settings_of(config)
        clauses = [*describe_generation(self.config.generation, config.generation), *clauses]
        if self._settings.tokens and not settings.tokens:
            refuse_unsaid_opening(data)
        clauses = [*describe_requests(self._settings, settings), *clauses]
        is_same = settings == self._settings and config.generation == self.config.generation
        app = self._app if is_same else self._make_app(settings, config)
        async with self._turn:
            await self._change(config)
            self._app, self._settings, self.config = app, settings, config
            self.shedding.follow(settings)
            self._taken_back = None
        clauses += [f"warning: {clause}" for clause in self.warnings]
        lacking = [version.generator_lacking for key, version in self._versions.items() if key not in before]
        clauses += [f"warning: {text.rstrip('.')}" for text in lacking if text is not None]
        if taken_back is not None:
            clauses.append(f"before this change, {taken_back}")
        return (
            "; ".join([*describe_versions(before, set(self._versions), was, config), *clauses]) or "nothing has changed"
        )

    @property
    def warnings(self) -> list[str]:
        """Clauses about this config for its owner."""
        own = warning_of(self.config, self._settings)
        return [each for each in (own, self._taken_back, *self.registry.uncopied) if each is not None]

    async def drained(self) -> None:
        """Return when removed versions have answered their requests."""
        if self._ending:
            await asyncio.wait(self._ending)

    def prepare_to_end(self) -> None:
        """Report not ready from now on, and end the streams that do not end by themselves."""
        self.registry.ready = False
        self.monitor.live.close()

    async def close(self, *, drain_s: float = DRAIN_S) -> None:
        """Answer waiting requests, then end everything. If cancelled, end without waiting.

        Args:
            drain_s: seconds after which requests that are not answered yet fail, as with a model that hangs.
        """
        if self._before is not None:
            self._keep()
        versions = [*self.registry.versions, *self._ending.values()]
        draining = asyncio.create_task(self._drain())
        try:
            await asyncio.wait({draining}, timeout=drain_s)
        finally:
            if not draining.done():
                await asyncio.gather(*(version.close(drain=False) for version in versions), return_exceptions=True)
        try:
            await draining
        finally:  # even if a version failed to end
            if self._spans is not None:
                await self._spans.close()

    async def _drain(self) -> None:
        try:
            await self.registry.close(drain=True)
        finally:
            await self.drained()

    async def _change(self, config: ServeConfig) -> None:
        contents = [await asyncio.to_thread(self._starters.content, model) for model in config.models]
        wanted = {key_of(model, config, content): model for model, content in zip(config.models, contents, strict=True)}
        if config.update.free_first:
            loaded, started = self._versions, await self._start_in_their_room(wanted, config)
        else:
            loaded = self._loaded()
            started = await self._start_all({key: each for key, each in wanted.items() if key not in loaded}, config)
        there = {**loaded, **started}
        versions = {key: there[key] for key in wanted}
        self._replace(config, versions, loaded)

    def _loaded(self) -> dict[VersionKey, ModelVersion]:
        """Return the versions that have a model, those before the last change included while they are kept."""
        loaded = {**(self._before[1] if self._before else {}), **self._versions}
        return {key: version for key, version in loaded.items() if version.replaced_in_s is None}

    async def _start_all(
        self, wanted: Mapping[VersionKey, ModelSection], config: ServeConfig
    ) -> dict[VersionKey, ModelVersion]:
        started = await _all_or_none([self._start(model, config) for model in wanted.values()])
        return dict(zip(wanted, started, strict=True))

    async def _start_in_their_room(
        self, wanted: Mapping[VersionKey, ModelSection], config: ServeConfig
    ) -> dict[VersionKey, ModelVersion]:
        """End the versions that are not wanted, start new ones in the memory that they had, and return those.

        Requests for those that end get a 503 meanwhile. If a new one cannot be started, the former are loaded again.

        Raises:
            OrchestrayError: a new version cannot be served; the former answer again, or the message says why not.
        """
        if self._before is not None:
            self._keep()
        new = {key: model for key, model in wanted.items() if key not in self._loaded()}
        before = sections_of([key for key in self._loaded() if key not in wanted], self.config) if new else {}
        for key in before:
            self._versions[key] = await stand_in(self._versions[key], self.config)
        if before:
            self._close(self.registry.update(_shares(self.config, self._versions)))
            await self.drained()
            self.settle()  # what no request uses any more is garbage, and has the device's memory
            await release()
        try:
            return await self._start_all(new, config)
        except OrchestrayError as error:
            try:
                self._versions |= await self._start_all(before, self.config)
            except OrchestrayError as lost:
                raise OrchestrayError(f"{error}; nor can the versions before it be loaded again: {lost}") from error
            if before:
                self._close(self.registry.update(_shares(self.config, self._versions)))
            raise

    def _replace(
        self, config: ServeConfig, versions: dict[VersionKey, ModelVersion], loaded: dict[VersionKey, ModelVersion]
    ) -> None:
        """Have these versions answer from the next request on, and end the others: after a watch, if there is one.

        Args:
            config: config with their shares.
            versions: versions that answer.
            loaded: versions that were loaded before.
        """
        watched = self._end_watch()
        goes_on = self._before is not None and any(version in versions.values() for version in watched)
        before = self._before if goes_on and self._before is not None else (self.config, self._versions)
        self._versions, self._before = versions, None
        self.registry.update(_shares(config, versions))
        new = [
            version
            for key, version in versions.items()
            if version not in before[1].values()
            and any(key.name == other.name for other in before[1])
            and version in self.registry[key.name].answering
        ]
        if new and config.update.rollback is not None:
            self._before = before
            self._watch = Watch(new, config.update.rollback, self.monitor, self._go_back, self._stand)
        kept = {**versions, **(self._before[1] if self._before else {})}
        if new or loaded != versions:
            self._close(version for version in loaded.values() if version not in kept.values())

    def _end_watch(self) -> list[ModelVersion]:
        """End the watch on new versions, if there is one; return them."""
        watch, self._watch = self._watch, None
        return [] if watch is None else watch.end()

    async def _stand(self) -> None:
        """Keep the new versions: they have stood the watch."""
        async with self._turn:
            self._keep()

    def _keep(self) -> None:
        """End the versions before the change."""
        assert self._before is not None
        self._end_watch()
        (_, old), self._before = self._before, None
        self._close(version for version in old.values() if version not in self._versions.values())

    async def _go_back(self, version: ModelVersion, reason: str) -> None:
        """Have the versions before the change answer again; they are loaded and warm."""
        async with self._turn:
            assert self._before is not None
            (config, old), self._before = self._before, None
            self._end_watch()
            models = {name: getattr(config, name) for name in _OF_VERSIONS}
            self.config = self.config.model_copy(update=models)
            gone, self._versions = self._versions, old
            self.registry.update(_shares(config, old))
            self._close(each for each in gone.values() if each not in old.values())
            self.monitor.rollbacks.labels(version.name, version.version).inc()
            at = time.strftime("%H:%M:%S")
            self._taken_back = f"{version.name} version {version.version} was taken back at {at}: {reason}"
            _log.warning("%s; the versions before it answer again", self._taken_back)
            if self.on_rollback is not None:
                await self.on_rollback()

    def _close(self, versions: Iterable[ModelVersion]) -> None:
        """End versions that get no more requests, once they have answered those that they have."""
        for version in versions:
            task = asyncio.create_task(version.close())
            self._ending[task] = version
            task.add_done_callback(self._ending.pop)
        drained = asyncio.ensure_future(self.drained())  # they are garbage then
        drained.add_done_callback(lambda done: None if done.cancelled() else self.settle())

    async def _start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        began_s = time.perf_counter()
        version = await self._starters.start(model, config)
        version.start_s = time.perf_counter() - began_s
        version.batcher.expect_start(version.start_s)
        version.rests = isinstance(config.replicas, Scaling) and config.replicas.min == 0
        _log.info("%s version %s is ready after %.2f s", model.name, model.version, version.start_s)
        return version

    def _make_app(self, settings: HttpSettings, config: ServeConfig) -> Any:
        if settings.access_log:
            log_access_to(sys.stderr)
        if settings.tracing and self._spans is None:
            # Owned by the endpoint, not the application: requests begun before a change may end after it.
            self._spans = Spans(enabled=True)
        router = make_generate_router(
            self.registry,
            max_body_bytes=settings.max_body_bytes,
            most_tokens=config.generation.max_tokens,
            most_prompt_bytes=config.generation.max_prompt_bytes,
        )
        return make_app(
            self.registry,
            settings,
            monitor=self.monitor,
            routers=[router],
            spans=self._spans if settings.tracing else None,
        )


def settings_of(config: ServeConfig) -> HttpSettings:
    tokens_file = config.auth.tokens_file
    return HttpSettings(
        max_body_bytes=int(config.http.max_body_mb * 2**20),
        tokens=Tokens.load(None if tokens_file is None else Path(tokens_file)),
        rate_limit_per_s=config.auth.requests_per_s,
        timeout_s=None if config.http.timeout_ms is None else config.http.timeout_ms / 1e3,
        cors_origins=config.http.cors_origins,
        root_path=config.http.root_path or "",
        access_log=config.http.access_log,
        tracing=config.http.tracing,
    )


def warning_of(config: ServeConfig, settings: HttpSettings) -> str | None:
    """Return a warning about this config for its owner, as a clause, or None."""
    if settings.tokens or is_local(config.http.host):
        return None
    return (
        f"http.host {config.http.host} lets other machines ask, without a token: "
        "set auth.tokens_file or ORCHESTRAY_TOKEN"
    )


async def _all_or_none(starting: Iterable[Coroutine[Any, Any, ModelVersion]]) -> list[ModelVersion]:
    """Start several versions; if one fails, or this is cancelled, the others are ended again."""
    tasks = [asyncio.create_task(each) for each in starting]
    try:
        await asyncio.gather(*tasks, return_exceptions=True)  # if cancelled, it ends when all of them have
        return [task.result() for task in tasks]
    except BaseException:
        started = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        await asyncio.gather(*(version.close(drain=False) for version in started), return_exceptions=True)
        raise


def _shares(config: ServeConfig, versions: dict[VersionKey, ModelVersion]) -> dict[str, list[Share]]:
    """Return the shares of each name's versions."""
    loaded = {(key.name, key.version): version for key, version in versions.items()}
    traffic = config.traffic()
    shares: dict[str, list[Share]] = {}
    for model in config.models:
        identity = model.name, model.version
        shares.setdefault(model.name, []).append(Share(loaded[identity], traffic.get(identity, 0.0), model.shadow))
    return shares
