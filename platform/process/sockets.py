"""Sockets that listen at an address, and checks whether a server listens there. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
from collections.abc import Mapping
from pathlib import Path

from orchestray.platform.errors import ConfigError, OrchestrayError

_BACKLOG = 2048
_FIRST_PORT = 20_000
"""Lowest port to choose: Ray's workers take those below."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def listen(host: str, port: int, *, key: str) -> socket.socket:
    """Return a socket that listens there: from now on the port is taken, and clients wait until the server accepts.

    Args:
        host: name or address; empty: every address of this machine.
        port: 0: any free one.
        key: the user's name of the host setting, for errors.

    Raises:
        OrchestrayError: the port is in use, or not allowed.
        ConfigError: this machine does not have this address.
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
        listening.listen(_BACKLOG)  # here: another process can bind a port that is bound but not yet listening
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
    """Return free ports for processes that get them as arguments.

    They are outside the range from which the kernel takes ports for connections, where that leaves enough: until such a
    process listens, any connection of this machine could take its port.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:  # all are held together so that they differ
        while len(found) < num_ports:
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # this one is taken
                one.bind(("", _candidate()))
                found.append(int(one.getsockname()[1]))
    return found


def _candidate() -> int:
    """Return a random port outside the kernel's range; 0, which is any free port, if the range leaves too few."""
    try:
        end = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    return random.SystemRandom().randrange(_FIRST_PORT, end) if end > _FIRST_PORT + 1000 else 0


def is_local(host: str) -> bool:
    """Return True if only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    """Return a host in the form used in URLs."""
    return f"[{host}]" if ":" in host else host


def url_of(listening: socket.socket, host: str, *, scheme: str = "http") -> str:
    """Return the URL, without a trailing slash, at which a browser on this machine reaches the server at `host`."""
    own = "127.0.0.1" if host in {"0.0.0.0", ""} else "::1" if host == "::" else host  # noqa: S104
    return f"{scheme}://{in_url(own)}:{listening.getsockname()[1]}"


def end_where_lost(connection: socket.socket, limits: Mapping[str, int]) -> None:
    """Let the system probe the other machine, and end the connection if it is gone.

    A machine that loses its power or network does not end its connections. A process that only waits for data from it
    would wait for ever, and one that sends for a quarter of an hour.

    Args:
        connection: TCP connection; one that has already ended is not an error here, as the next read reports it.
        limits: options by their names in `socket`, such as `TCP_KEEPIDLE`; those that this system lacks are ignored.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in limits.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listens(host: str, port: int, timeout_s: float) -> bool:
    """Return True if a server listens there: a store's client would retry a dead one for 2.5 times its timeout."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True
