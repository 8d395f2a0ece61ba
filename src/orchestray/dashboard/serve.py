"""The server of the dashboard, which runs until a signal stops it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from orchestray.dashboard.pages import make_app
from orchestray.platform.process.sockets import listen, url_of


class _Server(uvicorn.Server):
    """A server that reports when it is ready, and ends open streams on a signal: they would never end by themselves."""

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
    """Serve the dashboard; return, or raise KeyboardInterrupt, when a signal ends it.

    Args:
        runs_dir: directory of the runs and searches; it need not exist yet.
        host: address to listen on.
        port: 0: any free one.
        ray_dashboard: URL of the Ray dashboard, to link to.
        tensorboard: URL of a running TensorBoard, to link to.
        on_ready: called with the URL as soon as it answers.

    Raises:
        OrchestrayError: the port is in use, or not allowed.
        ConfigError: this machine does not have this address.
    """
    listening = listen(host, port, key="--host")
    app, hub = make_app(runs_dir.absolute(), host=host, ray_dashboard=ray_dashboard, tensorboard=tensorboard)
    url = f"{url_of(listening, host)}/"
    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=2, ws="none")
    with listening:
        _Server(config, lambda: on_ready(url), hub.close).run(sockets=[listening])
