"""The pages and their files."""

from __future__ import annotations

import asyncio

import httpx

from support.http_endpoint import endpoint

TYPES = {
    "/": "text/html",
    "/docs": "text/html",
    "/favicon.ico": "image/svg+xml",
    "/assets/page.css": "text/css",
    "/assets/page.js": "text/javascript",
    "/assets/swagger-ui-bundle.js": "text/javascript",
    "/assets/swagger-ui.css": "text/css",
}


def test_files_have_their_type_and_a_policy_and_come_once_unless_they_change() -> None:
    async def ask() -> list[tuple[httpx.Response, httpx.Response]]:
        async with endpoint() as asked:
            whole = [await asked.client.get(path) for path in TYPES]
            again = [
                await asked.client.get(path, headers={"if-none-match": answer.headers["etag"]})
                for path, answer in zip(TYPES, whole, strict=True)
            ]
            return list(zip(whole, again, strict=True))

    for (path, kind), (whole, again) in zip(TYPES.items(), asyncio.run(ask()), strict=True):
        assert whole.status_code == 200, path
        assert whole.headers["content-type"].startswith(kind), path
        assert (again.status_code, again.content) == (304, b""), path
        policy = whole.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert ("unsafe-inline" in policy) == (path == "/docs")
        assert whole.headers["x-content-type-options"] == "nosniff"
        assert whole.headers["cache-control"] == "no-cache"


def test_what_is_no_file_of_the_pages_is_a_404_in_the_form_of_every_refusal() -> None:
    async def ask(path: str) -> httpx.Response:
        async with endpoint() as asked:
            return await asked.client.get(path)

    for name in ("nothing.js", "..%2fpage.py", "%2e%2e", "%00", "a" * 5000):
        answer = asyncio.run(ask(f"/assets/{name}"))
        assert answer.status_code == 404, name
        assert answer.json()["error"].startswith("There is nothing at this address"), name
