"""Whether somebody serves at an address, asked before waiting for him. Imports no torch."""

from __future__ import annotations

import socket


def listens(host: str, port: int, timeout_s: float) -> bool:
    """Whether somebody serves there. A store's client asks a dead server again, for 2.5 times its timeout."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True
