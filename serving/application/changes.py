"""A change of an endpoint's config: which versions it keeps, what it may not do, and its description for the owner."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.serving.batching import BatchListener
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.config.schema import GenerationSection, ModelSection, ServeConfig
from orchestray.serving.http import HttpSettings
from orchestray.serving.replicas.batchers import make_batcher
from orchestray.serving.routing.endpoint import ModelVersion

_FIXED = ("host", "port", "tls", "read_timeout_s")
"""Keys of `http` that cannot change while the process runs."""


@dataclass(frozen=True)
class VersionKey:
    """The identity of a version: one with an equal key need not be started again."""

    name: str
    version: int
    settings: str
    content: str
    """Digest of the run's content, which changes if it is trained again."""


def key_of(model: ModelSection, config: ServeConfig, content: str) -> VersionKey:
    """Return the identity of a model's version.

    Args:
        model: model of the config.
        config: config of the endpoint.
        content: digest of the run's content.
    """
    return VersionKey(model.name, model.version, json.dumps(config.model_settings(model), sort_keys=True), content)


def refuse_unsaid_opening(data: dict[str, Any]) -> None:
    """Refuse to open an endpoint to everyone just because a change leaves the tokens out, as one with a run alone does.

    Raises:
        ConfigError: the change does not say that tokens are not needed.
    """
    auth = data.get("auth")
    if not isinstance(auth, dict) or "tokens_file" not in auth:
        raise ConfigError(
            "auth.tokens_file: the endpoint asks for tokens, and the change does not say which; name the file "
            "(auth.tokens_file=FILE), or say that anyone may ask (auth.tokens_file=null)"
        )


def describe_requests(was: HttpSettings, now: HttpSettings) -> list[str]:
    """Return a clause about each change in what requests pass before a model."""
    clauses = {
        "tokens": "other tokens are taken" if now.tokens else "no token is needed any more",
        "max_body_bytes": f"bodies may have {now.max_body_bytes / 2**20:g} MB",
        "rate_limit_per_s": f"a token may ask {now.rate_limit_per_s:g} times a second"
        if now.rate_limit_per_s is not None
        else "a token may ask as often as it likes",
        "timeout_s": f"a request that names no deadline has {now.timeout_s * 1e3:g} ms"
        if now.timeout_s is not None
        else "a request that names no deadline has none",
        "cors_origins": f"pages of {', '.join(now.cors_origins) or 'no other origin'} may ask",
        "root_path": f"its prefix is {now.root_path or 'that of X-Forwarded-Prefix'}",
        "access_log": f"the access log is {'on' if now.access_log else 'off'}",
        "tracing": f"tracing is {'on' if now.tracing else 'off'}",
    }
    return _of_changed(was, now, clauses)


def describe_generation(was: GenerationSection, now: GenerationSection) -> list[str]:
    """Return a clause about each change in what a request may ask a language model for."""
    clauses = {
        "max_tokens": f"a request may ask for {now.max_tokens} tokens",
        "max_prompt_bytes": f"a prompt may have {now.max_prompt_bytes} bytes",
    }
    return _of_changed(was, now, clauses)


def _of_changed(was: object, now: object, clauses: dict[str, str]) -> list[str]:
    return [clause for key, clause in clauses.items() if getattr(was, key) != getattr(now, key)]


def keep_fixed(running: ServeConfig, data: dict[str, Any]) -> tuple[ServeConfig, list[str]]:
    """Return the new config with the fixed keys of this process, and a clause about each that it would change."""
    http = data.get("http")
    given = http if isinstance(http, dict) else {}
    now = running.http.model_dump(mode="json")
    kept = {key: now[key] for key in _FIXED}
    clauses = [
        f"http.{key} stays {_shown(now[key])} until it is started again"
        for key in _FIXED
        if key in given and given[key] != now[key]
    ]
    return load_serve_config({**data, "name": running.name, "http": {**given, **kept}}), clauses


def _shown(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) else "what it is"


def describe_versions(
    before: set[VersionKey], after: set[VersionKey], was: dict[tuple[str, int], float], config: ServeConfig
) -> list[str]:
    """Return a clause about each version that came or went, or whose share of the requests changed.

    Args:
        before: versions before the change.
        after: versions after it.
        was: per cent of its model's requests that each version (name, number) got before.
        config: config after the change.
    """
    came, went = ({(key.name, key.version) for key in keys} for keys in (after - before, before - after))
    clauses = [
        f"{name} version {version} is {'replaced' if (name, version) in went else 'new'}"
        for name, version in sorted(came)
    ]
    clauses += [f"{name} version {version} is gone" for name, version in sorted(went - came)]
    clauses += [
        f"{name} version {version} gets {per_cent:g} % of its requests"
        for (name, version), per_cent in config.traffic().items()
        if was.get((name, version)) != per_cent
    ]
    return clauses


async def stand_in(version: ModelVersion, config: ServeConfig) -> ModelVersion:
    """Return a version that has no model, and that has clients retry when the successor is there.

    It references nothing of the version but its signature.

    Args:
        version: version that it stands for.
        config: config of the endpoint.
    """
    empty = ModelVersion(version.signature, make_batcher(config.batching, BatchListener()))
    empty.replaced_in_s = version.start_s or 0.0  # as long as its own loading took
    await empty.batcher.close()
    return empty


async def release() -> None:
    """Give the memory of models that are garbage back to their device."""
    if "torch" in sys.modules:  # else the models are those of other processes
        from orchestray.serving.models.device import release_memory

        await asyncio.to_thread(release_memory)


def sections_of(keys: Iterable[VersionKey], config: ServeConfig) -> dict[VersionKey, ModelSection]:
    """Return the section of each version in the config that it was started by."""
    sections = {(model.name, model.version): model for model in config.models}
    return {key: sections[key.name, key.version] for key in keys}
