"""What becomes of a request by how long it has waited to be read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestray.serving.http import Monitor
from orchestray.serving.http.shedding import WAITED_KEY, Shedding


class Waited:
    """In place of the estimate."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def waited_s(self, loop: asyncio.AbstractEventLoop) -> float:
        return self.seconds


def status_of(waited_s: float, timeout_ms: str | None, *, method: str = "POST", default_s: float | None = None) -> Any:
    """The refusal's status, or what the application is told."""
    sent: list[dict[str, Any]] = []
    told: list[float] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        told.append(scope.get(WAITED_KEY, 0.0))

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    shedding = Shedding(Monitor(), default_s)
    shedding._pressure = Waited(waited_s)  # type: ignore[assignment]
    headers = [] if timeout_ms is None else [(b"x-request-timeout-ms", timeout_ms.encode())]
    scope = {"type": "http", "method": method, "path": "/predict", "headers": headers}
    asyncio.run(shedding(app, scope, receive, send))
    return sent[0]["status"] if sent else told[0]


@pytest.mark.parametrize(
    ("waited_s", "timeout_ms", "default_s", "outcome"),
    [
        (0.0, None, None, 0.0),
        (0.9, None, None, 0.9),
        (1.1, None, None, 503),
        (0.04, "100", None, 0.04),
        (0.06, "100", None, 503),
        (1.1, "10000", None, 1.1),
        (0.3, None, 0.5, 503),
        (0.2, None, 0.5, 0.2),
        (5.0, "soon", None, 5.0),  # the application says what is wrong with the header
        (5.0, "nan", None, 5.0),
    ],
)
def test_what_waited_half_its_time_is_refused_and_others_bring_their_wait(
    waited_s: float, timeout_ms: str | None, default_s: float | None, outcome: float
) -> None:
    assert status_of(waited_s, timeout_ms, default_s=default_s) == outcome


def test_pages_and_health_are_answered_however_long_they_waited() -> None:
    assert status_of(9.0, None, method="GET") == 0.0
