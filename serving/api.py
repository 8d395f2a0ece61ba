"""`orchestray.serve`: an HTTP endpoint for a run or a config."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orchestray.platform.errors import Interrupted
from orchestray.platform.process.sockets import listen
from orchestray.serving.config.checks import check_environment
from orchestray.serving.config.load import ServeSource, load_serve_config
from orchestray.serving.config.schema import ServeConfig
from orchestray.serving.lifecycle.control import send
from orchestray.serving.lifecycle.name_lock import START_PATIENCE_S, EndpointState, find_endpoint
from orchestray.serving.lifecycle.on_ray import OnRay
from orchestray.serving.lifecycle.run import run_endpoint
from orchestray.serving.runtime.event_loop import FineLoop

if TYPE_CHECKING:
    from orchestray.serving.application.served import Served


def serve(
    source: ServeSource,
    *,
    overrides: Sequence[str] = (),
    runs_dir: str | os.PathLike[str] = "runs",
    name: str | None = None,
    address: str | None = None,
    local: bool = False,
    on_ready: Callable[[str], None] = lambda _url: None,
) -> None:
    """Serve a run, or the models of a config, over HTTP; return when SIGTERM ends it.

    Args:
        source: a run directory, a YAML file, a mapping, or a `ServeConfig`.
        overrides: `key.path=value`, applied after loading.
        runs_dir: directory in which `update` can find the running endpoint by its name.
        name: name of the endpoint; replaces the config's.
        address: Ray cluster; default: one that is started here.
        local: True to answer in this process, without Ray: for models with one replica.
        on_ready: called with the URL as soon as it answers.

    Raises:
        ConfigError: the config is wrong (every problem is listed), or a variable of the environment.
        RunNameError: an endpoint of that name runs.
        ClusterError: the cluster does not answer, or lacks the resources.
        OrchestrayError: the port is taken, or a model cannot be loaded.
        Interrupted: Ctrl-C; running requests have been answered.
    """
    config = load_serve_config(source, overrides, name=name)
    check_environment()
    state = EndpointState(runs_dir, config.name)
    try:
        with asyncio.Runner(loop_factory=FineLoop) as runner, contextlib.ExitStack() as stack:

            async def run() -> bool:
                side = _local(config, stack) if local else _on_ray(config, stack, address)
                return await run_endpoint(config.name, side, state, on_ready)

            interrupted = runner.run(run())
    finally:
        state.close()
    if interrupted:
        raise Interrupted("Interrupted; what was under way has been answered.")


def update(
    source: ServeSource,
    *,
    overrides: Sequence[str] = (),
    runs_dir: str | os.PathLike[str] = "runs",
    name: str | None = None,
) -> str:
    """Apply a changed config to the running endpoint of its name, without a failed request.

    Args:
        source, overrides, name: see `serve`.
        runs_dir: directory in which the endpoint is found by its name.

    Returns:
        the changes, in a sentence.

    Raises:
        ConfigError: the config is wrong, or asks for changes that need a new process.
        RunNameError: no endpoint of that name runs.
        OrchestrayError: a new model cannot be loaded; the endpoint goes on as before.
    """
    config = load_serve_config(source, overrides, name=name)
    endpoint = find_endpoint(runs_dir, config.name, patience_s=START_PATIENCE_S)
    return send(endpoint, config=config.model_dump(mode="json", exclude_unset=True))


def replace(
    source: ServeSource,
    replica: str,
    *,
    overrides: Sequence[str] = (),
    runs_dir: str | os.PathLike[str] = "runs",
    name: str | None = None,
) -> str:
    """Have a replica of a running endpoint answer what it has, and end; Ray Serve puts another in its place.

    Args:
        source, overrides, name: see `serve`; they only say the name of the endpoint.
        replica: name of the replica in the metrics.
        runs_dir: directory in which the endpoint is found by its name.

    Returns:
        the change, in a sentence.

    Raises:
        RunNameError: no endpoint of that name runs.
        OrchestrayError: it has no such replica.
    """
    config = load_serve_config(source, overrides, name=name)
    return send(find_endpoint(runs_dir, config.name, patience_s=START_PATIENCE_S), replace=replica)


def _local(config: ServeConfig, stack: contextlib.ExitStack) -> Served:
    """Return an endpoint in this process, with a socket that `stack` closes."""
    from orchestray.serving.application.endpoint import LiveEndpoint
    from orchestray.serving.application.served import Served
    from orchestray.serving.application.starting import check_local

    check_local(config)
    listening = stack.enter_context(listen(config.http.host, config.http.port, key="http.host"))
    return Served(LiveEndpoint(config), listening)


def _on_ray(config: ServeConfig, stack: contextlib.ExitStack, address: str | None) -> OnRay:
    """Return an endpoint under Ray Serve, whose port is taken from now on."""
    listening = stack.enter_context(listen(config.http.host, config.http.port, key="http.host"))
    http = config.http.model_copy(update={"port": listening.getsockname()[1]})
    return OnRay(config.model_copy(update={"http": http}), listening, address)
