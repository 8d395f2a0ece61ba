"""A running endpoint: its models as its config says, and how a new config is taken over between two requests."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestray.platform.config.serving.load import load_serve_config
from orchestray.platform.config.serving.schema import ModelSection, ServeConfig
from orchestray.platform.errors import ConfigError
from orchestray.serving.deployments.versions import ListenerOf, Starter, Starters
from orchestray.serving.generation.router import make_generate_router
from orchestray.serving.http import HttpSettings, Monitor, Tokens, log_access_to, make_app
from orchestray.serving.http.shedding import Shedding
from orchestray.serving.models.endpoint import ModelVersion, Share
from orchestray.serving.models.registry import Registry

_log = logging.getLogger("orchestray.serving")

_FIXED = ("host", "port", "tls", "fronts")
"""Keys of `http` that belong to the process."""


@dataclass(frozen=True)
class _Key:
    """What makes a version what it is: an equal one need not be started again."""

    name: str
    version: int
    settings: str
    content: str
    """Of the run: it may have been trained anew."""


class LiveEndpoint:
    """The models of an endpoint and its ASGI application (`self`), which changes with the config.

    Lives on one event loop.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        address: str | None = None,
        settings: HttpSettings | None = None,
        make_starter: Callable[[ListenerOf], Starter] | None = None,
    ) -> None:
        self.config = config
        self.registry = Registry()
        self.monitor = Monitor()
        listener_of = self.monitor.listener
        self._starters = Starters(listener_of, address) if make_starter is None else make_starter(listener_of)
        self._versions: dict[_Key, ModelVersion] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._settings = settings or settings_of(config)
        self._app = self._make_app(self._settings)
        self.shedding = Shedding(self.monitor, self._settings, self.registry)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI: by the application as it is now."""
        await self.shedding(self._app, scope, receive, send)

    async def start(self) -> None:
        """Load and warm everything.

        Raises:
            OrchestrayError: a model cannot be served.
        """
        await self._change(self.config, self._settings)

    async def apply(self, data: dict[str, Any]) -> str:
        """Take over a changed config: what is new is loaded and warm before a request reaches it.

        Requests that are under way are answered by what they came to.

        Returns:
            what has changed, in a sentence.

        Raises:
            ConfigError: the config is wrong.
            OrchestrayError: a model cannot be served. Nothing has changed then.
        """
        config, told = _kept(self.config, data)
        before, was = set(self._versions), self.config.traffic()
        settings = settings_of(config)
        if self._settings.tokens and not settings.tokens:
            _refuse_unsaid_opening(data)
        told = [*_told_of_requests(self._settings, settings), *told]
        await self.take_over(config, settings)
        return "; ".join([*_told(before, set(self._versions), was, config), *told]) or "nothing has changed"

    async def take_over(self, config: ServeConfig, settings: HttpSettings) -> None:
        """As `apply`, of a config that is checked."""
        app = self._app if settings == self._settings else self._make_app(settings)
        await self._change(config, settings)
        self._app, self._settings, self.config = app, settings, config
        self.shedding.follow(settings)

    async def drained(self) -> None:
        """Return when versions that are gone have answered what they had."""
        if self._ending:
            await asyncio.wait(self._ending)

    def prepare_to_end(self) -> None:
        """Say that it is not ready any more, and end the streams that would never end by themselves."""
        self.registry.ready = False
        self.monitor.live.close()

    async def close(self) -> None:
        """Answer what waits, then end everything."""
        await self.registry.close(drain=True)
        await self.drained()
        await self._starters.close()

    async def _change(self, config: ServeConfig, settings: HttpSettings) -> None:
        contents = [await asyncio.to_thread(self._starters.content, model) for model in config.models]
        wanted = {_key(model, config, content): model for model, content in zip(config.models, contents, strict=True)}
        new = [key for key in wanted if key not in self._versions]
        started = await _all_or_none([self._start(wanted[key], config) for key in new])
        versions = {**self._versions, **dict(zip(new, started, strict=True))}
        wanted_versions = {key: versions[key] for key in wanted}
        await self._before_change(config, settings, [*wanted_versions.values()])
        self._versions = wanted_versions
        shares: dict[str, list[Share]] = {}
        traffic = config.traffic()
        for key, model in wanted.items():
            share = Share(self._versions[key], traffic.get((model.name, model.version), 0.0), model.shadow)
            shares.setdefault(model.name, []).append(share)
        for version in self.registry.update(shares):
            task = asyncio.create_task(version.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _before_change(self, config: ServeConfig, settings: HttpSettings, versions: list[ModelVersion]) -> None:
        """All versions are there, and none has ended yet."""

    async def _start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        began_s = time.perf_counter()
        version = await self._starters.start(model, config)
        version.start_s = time.perf_counter() - began_s
        _log.info("%s version %s is ready after %.2f s", model.name, model.version, version.start_s)
        return version

    def _make_app(self, settings: HttpSettings) -> Any:
        if settings.access_log:
            log_access_to(sys.stderr)
        router = make_generate_router(self.registry, max_body_bytes=settings.max_body_bytes)
        return make_app(self.registry, settings, monitor=self.monitor, routers=[router])


def settings_of(config: ServeConfig) -> HttpSettings:
    tokens_file = config.auth.tokens_file
    return HttpSettings(
        max_body_bytes=int(config.http.max_body_mb * 2**20),
        tokens=Tokens.load(None if tokens_file is None else Path(tokens_file)),
        rate_limit_per_s=config.auth.requests_per_s,
        access_log=config.http.access_log,
        tracing=config.http.tracing,
    )


def _refuse_unsaid_opening(data: dict[str, Any]) -> None:
    """Nobody opens an endpoint to everyone by leaving something out: a way back that names a run alone would.

    Raises:
        ConfigError: the change does not say that no token is needed.
    """
    auth = data.get("auth")
    if not isinstance(auth, dict) or "tokens_file" not in auth:
        raise ConfigError(
            "auth.tokens_file: the endpoint asks for tokens, and the change does not say which; name the file "
            "(auth.tokens_file=FILE), or say that anyone may ask (auth.tokens_file=null)"
        )


def _told_of_requests(was: HttpSettings, now: HttpSettings) -> list[str]:
    """A clause about each thing that requests meet before a model."""
    clauses = {
        "tokens": "other tokens are taken" if now.tokens else "no token is needed any more",
        "max_body_bytes": f"bodies may have {now.max_body_bytes / 2**20:g} MB",
        "rate_limit_per_s": f"a token may ask {now.rate_limit_per_s:g} times a second"
        if now.rate_limit_per_s is not None
        else "a token may ask as often as it likes",
        "access_log": f"the access log is {'on' if now.access_log else 'off'}",
        "tracing": f"tracing is {'on' if now.tracing else 'off'}",
    }
    return [clause for key, clause in clauses.items() if getattr(was, key) != getattr(now, key)]


async def _all_or_none(starting: Iterable[Any]) -> list[ModelVersion]:
    """Start several versions; if one cannot be, the others are ended again."""
    results = await asyncio.gather(*starting, return_exceptions=True)
    versions = [result for result in results if isinstance(result, ModelVersion)]
    for result in results:
        if isinstance(result, BaseException):
            await asyncio.gather(*(version.close(drain=False) for version in versions))
            raise result
    return versions


def _key(model: ModelSection, config: ServeConfig, content: str) -> _Key:
    return _Key(model.name, model.version, json.dumps(config.model_settings(model), sort_keys=True), content)


def _kept(running: ServeConfig, data: dict[str, Any]) -> tuple[ServeConfig, list[str]]:
    """The new config with what only a new process could change as it is, and a clause about each such key."""
    http = data.get("http")
    given = http if isinstance(http, dict) else {}
    now = running.http.model_dump(mode="json")
    kept = {key: now[key] for key in _FIXED}
    told = [
        f"http.{key} stays {_shown(now[key])} until it is started again"
        for key in _FIXED
        if key in given and given[key] != now[key]
    ]
    return load_serve_config({**data, "name": running.name, "http": {**given, **kept}}), told


def _shown(value: object) -> str:
    return str(value) if isinstance(value, str | int) else "what it is"


def _told(before: set[_Key], after: set[_Key], was: dict[tuple[str, int], float], config: ServeConfig) -> list[str]:
    came, went = ({(key.name, key.version) for key in keys} for keys in (after - before, before - after))
    told = [
        f"{name} version {version} is {'replaced' if (name, version) in went else 'new'}"
        for name, version in sorted(came)
    ]
    told += [f"{name} version {version} is gone" for name, version in sorted(went - came)]
    told += [
        f"{name} version {version} gets {per_cent:g} % of its requests"
        for (name, version), per_cent in config.traffic().items()
        if was.get((name, version)) != per_cent
    ]
    return told
