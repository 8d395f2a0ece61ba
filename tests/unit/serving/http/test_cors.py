"""Pages of other origins: they read what is answered before the application as they read its answers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest

from orchestray.serving.http import HttpSettings
from orchestray.serving.http.overload.shedding import LoadShedder
from support.http_endpoint import ROW_SUMS, endpoint

PAGE = "https://page.example"


@pytest.mark.parametrize("origins", [(PAGE,), ("https://other.example", PAGE), ("*",), ("https://other.example",), ()])
def test_a_page_reads_a_refusal_before_the_application_where_it_reads_an_answer(origins: tuple[str, ...]) -> None:
    async def unasked(*_: Any) -> None:
        raise AssertionError("the application was asked")

    async def ask() -> list[httpx.Response]:
        settings, body = HttpSettings(cors_origins=origins), {"inputs": ROW_SUMS.example}
        async with endpoint(settings=settings) as asked:
            answered = await asked.client.post("/predict", json=body, headers={"origin": PAGE})
            shedding = LoadShedder(asked.monitor, settings, asked.registry)
            transport = httpx.ASGITransport(partial(shedding, unasked))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
                late = {"origin": PAGE, "x-request-timeout-ms": "0"}
                return [answered, await client.post("/predict", json=body, headers=late)]

    answered, refused = asyncio.run(ask())
    assert (answered.status_code, refused.status_code) == (200, 503)
    may_read = PAGE in origins or "*" in origins
    for name in ("access-control-allow-origin", "access-control-expose-headers", "vary"):
        assert refused.headers.get(name) == (answered.headers[name] if may_read else None)
    assert ("access-control-allow-origin" in refused.headers) == may_read


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
def test_a_browser_is_let_send_json_with_the_headers_of_requests_and_read_which_version_answered(
    origins: tuple[str, ...],
) -> None:
    wanted = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, x-request-timeout-ms, authorization",
    }

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        async with endpoint(settings=HttpSettings(cors_origins=origins)) as asked:
            first = await asked.client.options("/predict", headers=wanted)
            body = {"inputs": ROW_SUMS.example}
            return first, await asked.client.post("/predict", json=body, headers={"origin": PAGE})

    first, answered = asyncio.run(ask())
    assert first.status_code == 200
    assert "POST" in first.headers["access-control-allow-methods"]
    allowed = first.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in ("content-type", "x-request-timeout-ms", "authorization"))
    exposed = answered.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "x-model-version", "retry-after"} <= set(exposed)
