"""Serving the dashboard until it is told to stop."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from orchestray.platform.listening import listen, url_of
from orchestray.search.dashboard.pages import make_app


class _Server(uvicorn.Server):
    """Says when it is ready, and ends open streams when it is told to stop: they would never end by themselves."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_exit = on_exit

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._on_exit()


def serve(
    runs_dir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8266,
    ray_dashboard: str | None = None,
    tensorboard: str | None = None,
    on_ready: Callable[[str], None] = print,
) -> None:
    """Serve the dashboard; returns, or raises KeyboardInterrupt, when a signal ends it.

    Args:
        runs_dir: where the runs and searches are; it need not exist yet.
        host: address to listen on.
        port: 0: any that is free.
        ray_dashboard: URL of the Ray dashboard, to link to.
        tensorboard: URL of a TensorBoard that runs, to link to.
        on_ready: called with the URL as soon as it answers.

    Raises:
        OrchestrayError: it cannot listen there.
        ConfigError: the host is none.
    """
    listening = listen(host, port, key="--host")
    app, hub = make_app(runs_dir.absolute(), host=host, ray_dashboard=ray_dashboard, tensorboard=tensorboard)
    url = f"{url_of(listening, host)}/"
    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=2, ws="none")
    with listening:
        _Server(config, lambda: on_ready(url), hub.close).run(sockets=[listening])
