"""An endpoint behind a proxy that shows it under a prefix."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import httpx
import pytest

from orchestray.serving.http import HttpSettings, Tokens
from orchestray.serving.http.auth import Token
from orchestray.serving.http.middleware import with_prefix
from support.http_endpoint import endpoint

INPUTS = [[1, 2, 3], [4, 5, 6]]
SET = HttpSettings(root_path="/models/digits")
FORWARDED = {"X-Forwarded-Prefix": "/models/digits/"}


@pytest.mark.parametrize(
    ("settings", "headers", "before"),
    [(SET, {}, ""), (SET, {}, "/models/digits"), (None, FORWARDED, ""), (None, FORWARDED, "/models/digits")],
)
def test_links_and_redirects_have_the_prefix_that_a_proxy_takes_off_or_leaves(
    settings: HttpSettings | None, headers: dict[str, str], before: str
) -> None:
    async def ask() -> list[httpx.Response]:
        async with endpoint(settings=settings) as asked:
            client = asked.client
            found = [await client.get(f"{before}{path}", headers=headers) for path in ("/openapi.json", "/", "/docs")]
            for path in ("/predict", "/predict/"):
                found += [await client.post(before + path, json={"inputs": INPUTS}, headers=headers)]
            return found

    document, page, docs, answer, redirect = asyncio.run(ask())
    assert document.json()["servers"] == [{"url": "/models/digits"}]
    assert (page.status_code, docs.status_code) == (200, 200)
    assert answer.json() == {"outputs": [6.0, 15.0]}
    assert redirect.headers["location"] == "http://endpoint/models/digits/predict"


def test_without_a_prefix_there_are_no_servers_and_an_unsafe_header_is_none() -> None:
    async def ask(prefix: str) -> Any:
        async with endpoint() as asked:
            return (await asked.client.get("/openapi.json", headers={"X-Forwarded-Prefix": prefix})).json()

    for unsafe in ("", "/", "//evil.example", "/a//b", 'a"b', "https://evil.example"):
        assert "servers" not in asyncio.run(ask(unsafe))


def test_the_prefix_of_a_server_comes_behind_that_of_a_proxy_before_it() -> None:
    scope = {"type": "http", "path": "/route/predict", "root_path": "/route", "headers": []}
    assert with_prefix(scope, "")["path"] == "/route/predict"
    outer = with_prefix({**scope, "headers": [(b"x-forwarded-prefix", b"/outer")]}, "")
    assert (outer["root_path"], outer["path"]) == ("/outer/route", "/outer/route/predict")
    assert with_prefix(scope, "/set")["path"] == "/set/predict"


def test_under_a_prefix_health_needs_no_token_and_models_do() -> None:
    tokens = Tokens((Token(hashlib.sha256(b"right").hexdigest(), "us"),))

    async def ask() -> list[int]:
        async with endpoint(settings=HttpSettings(tokens=tokens, root_path="/a/b")) as asked:
            return [
                (await asked.client.get(f"/a/b{path}")).status_code for path in ("/ping", "/models", "/ping/models")
            ]

    assert asyncio.run(ask()) == [200, 401, 401]
