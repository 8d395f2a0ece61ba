"""Listening at an address, and whether somebody does. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Mapping

from orchestray.platform.errors import ConfigError, OrchestrayError

_BACKLOG = 2048


def listen(host: str, port: int, *, key: str) -> socket.socket:
    """A socket that listens there: from now on nobody else can, and who connects waits for the server.

    Args:
        host: name or address; empty: every address of this machine.
        port: 0: any that is free.
        key: what the user says the host by, for errors.

    Raises:
        OrchestrayError: somebody else does, or it is not allowed.
        ConfigError: there is no such address here.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"{key}: there is no host {host!r} ({error.strerror}); this machine is 127.0.0.1") from error
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(_BACKLOG)  # here: a port that is bound alone can be bound by another process too
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"{key}: this machine has no address {host}; 127.0.0.1 is for this machine alone, 0.0.0.0 all it has"
            ) from error
        raise OrchestrayError(
            f"could not listen on {in_url(host)}:{port}: {(error.strerror or str(error)).lower()}; "
            "choose another port with --port (0: any that is free)"
        ) from error
    return listening


def free_ports(num_ports: int) -> list[int]:
    """Ports nobody listens at, for processes that are told theirs; held open together so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    """A host as URLs have it."""
    return f"[{host}]" if ":" in host else host


def url_of(listening: socket.socket, host: str, *, scheme: str = "http") -> str:
    """What a browser on this machine opens, without a slash at the end, where `host` is listened at."""
    own = "127.0.0.1" if host in {"0.0.0.0", ""} else "::1" if host == "::" else host  # noqa: S104
    return f"{scheme}://{in_url(own)}:{listening.getsockname()[1]}"


def end_where_lost(connection: socket.socket, limits: Mapping[str, int]) -> None:
    """Have the system ask whether the other machine is there, and end the connection where it is not.

    One that loses its power, or the network, sends no end of the connection: who only waits for it to say something
    would wait for ever, and who sends to it for a quarter of an hour.

    Args:
        connection: over TCP; that it has ended already is no error: the next read says so.
        limits: options by their names in `socket`, such as `TCP_KEEPIDLE`; those that this system lacks are left out.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in limits.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listens(host: str, port: int, timeout_s: float) -> bool:
    """Whether somebody serves there. A store's client asks a dead server again, for 2.5 times its timeout."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True
