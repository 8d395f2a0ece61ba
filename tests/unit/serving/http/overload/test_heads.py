"""Heads of requests that are read at a glance: only where nothing else can be meant."""

from __future__ import annotations

import math

import pytest

from orchestray.serving.http.overload.heads import Heads, RequestHints
from orchestray.serving.http.request_context import LONGEST_TIMEOUT_MS

BODY = b'{"inputs": 1}'


def request(*headers: str, first: str = "POST /predict HTTP/1.1", body: bytes = BODY, length: bool = True) -> bytes:
    lines = [first, "Host: a", *headers, *([f"Content-Length: {len(body)}"] if length else [])]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@pytest.mark.parametrize(
    ("data", "wish"),
    [
        (request(), RequestHints(None, None, True)),
        (request("connection: Keep-Alive"), RequestHints(None, None, True)),
        (request("X-Request-Timeout-Ms: 100"), RequestHints(0.1, None, True)),
        (request("x-request-timeout-ms:\t250 "), RequestHints(0.25, None, True)),
        *(
            (request(f"X-Request-Timeout-Ms: {text}"), RequestHints(timeout_s, None, True))
            for text, timeout_s in [
                ("0", 0.0),
                (f"{LONGEST_TIMEOUT_MS}", LONGEST_TIMEOUT_MS / 1e3),
                (f"{LONGEST_TIMEOUT_MS + 1}", math.inf),
                ("-1", math.inf),
                ("nan", math.inf),
                ("soon", math.inf),
            ]
        ),
        (request("X-Request-Id: mine"), RequestHints(None, b"mine", True)),
        (request("X-Model-Version: 2"), RequestHints(None, None, False)),
        (request("X-Model: digits"), RequestHints(None, None, False)),
        (request("X-Request-Priority: 2"), RequestHints(None, None, False, priority=2)),
        (request("X-Request-Priority: -100"), RequestHints(None, None, False, priority=-100)),
        (request("X-Request-Priority: 101"), RequestHints(None, None, False)),
        (request("X-Request-Priority: first"), RequestHints(None, None, False)),
        (request(first="POST /predict?version=2 HTTP/1.1"), RequestHints(None, None, False)),
        (request(first="POST /invocations HTTP/1.1"), RequestHints(None, None, False)),
        (request(body=b""), RequestHints(None, None, True)),
        (request("Origin: https://a.example"), RequestHints(None, None, True, origin=b"https://a.example")),
    ],
)
def test_what_a_request_says_of_itself_is_known_from_its_bytes(data: bytes, wish: RequestHints) -> None:
    heads = Heads()
    for _ in range(2):
        head = heads.read(data)
        assert head is not None
        assert head.wish == wish
        assert head.num_bytes == len(data)


@pytest.mark.parametrize(
    "data",
    [
        request()[:-1],
        request() + b"P",
        request() + request(),
        request()[:30],
        request(length=False),
        request("Content-Length: 13"),
        request("Content-Length: 0"),
        request("Content-Length: " + "0" * 16 + "1300", body=BODY, length=False),
        request("Content-Length: " + "0" * 17 + "13", length=False),
        request("Content-Length: +13", length=False),
        request("Content-Length:", length=False),
        request("Proxy-Connection: close"),
        request("Proxy-Connection: keep-alive"),
        request("Transfer-Encoding: chunked"),
        request("Expect: 100-continue"),
        request("Upgrade: websocket"),
        request("Connection: close"),
        request("Connection: keep-alive, upgrade"),
        request(first="POST /predict HTTP/1.0"),
        request(first="GET /predict HTTP/1.1"),
        request(first="POST  /predict HTTP/1.1"),
        request(first="POST predict HTTP/1.1"),
        request("X : space before the colon"),
        request(" folded: line"),
        request("no colon"),
        request("X: line\nContent-Length: 5"),
        request("X: \x00"),
        request("X: \xe9"),
        request("Content-Length : 5"),
        request("X: " + "x" * 4000),
        b"",
    ],
)
def test_what_is_not_certain_is_left_to_the_parser(data: bytes) -> None:
    heads = Heads()
    assert heads.read(data) is None
    assert heads.read(data) is None


@pytest.mark.parametrize(
    ("target", "path", "is_openai"),
    [
        ("/v1/completions", b"/v1/completions", True),
        ("/proxy/v1/completions?a=1", b"/proxy/v1/completions", True),
        ("/predict?then=/v1/completions", b"/predict", False),
    ],
)
def test_the_form_of_a_refusal_is_that_of_the_path_under_any_prefix(target: str, path: bytes, is_openai: bool) -> None:
    head = Heads().read(request(first=f"POST {target} HTTP/1.1"))
    assert head is not None
    assert (head.wish.path, head.wish.is_openai) == (path, is_openai)


def test_a_body_of_another_length_under_the_same_head_is_left_to_the_parser() -> None:
    heads = Heads()
    assert heads.read(request()) is not None
    assert heads.read(request()[:-3]) is None
    assert heads.read(request()) is not None


def test_what_is_remembered_is_bounded() -> None:
    heads = Heads()
    for number in range(3000):
        assert heads.read(request(f"X-Some: {number}")) is not None
        assert heads.read(request(f"X-Request-Id: {number}")) is not None
    assert len(heads._known) <= 512
    assert not any(b"X-Request-Id" in raw for raw in heads._known), "a head that comes once is not kept"
