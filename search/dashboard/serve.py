"""Serving the dashboard until it is told to stop."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from orchestray.platform.errors import ConfigError, OrchestrayError
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
    on_ready: Callable[[str], None] = print,
) -> None:
    """Serve the dashboard; returns, or raises KeyboardInterrupt, when a signal ends it.

    Args:
        runs_dir: where the runs and searches are; it need not exist yet.
        host: address to listen on.
        port: 0: any that is free.
        ray_dashboard: URL of the Ray dashboard, to link to.
        on_ready: called with the URL as soon as it answers.

    Raises:
        OrchestrayError: it cannot listen there.
        ConfigError: the host is none.
    """
    listening = listen(host, port)
    app, hub = make_app(runs_dir.absolute(), host=host, ray_dashboard=ray_dashboard)
    url = f"http://{_in_url(host)}:{listening.getsockname()[1]}/"
    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=2, ws="none")
    with listening:
        _Server(config, lambda: on_ready(url), hub.close).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        OrchestrayError: somebody else does, or it is not allowed.
        ConfigError: there is no such address here.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host: there is no host {host!r} ({error.strerror}); this machine is 127.0.0.1") from error
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise OrchestrayError(
            f"could not listen on {_in_url(host)}:{port}: {(error.strerror or str(error)).lower()}; "
            "choose another port with --port (0: any that is free)"
        ) from error
    return listening


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
