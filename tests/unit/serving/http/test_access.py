"""Access to an endpoint: who may ask, how often, and what is logged of it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.serving.http import HttpProblem, HttpSettings, Tokens, log_access_to
from orchestray.serving.http.access_log import ACCESS_LOGGER
from orchestray.serving.http.auth import RateLimits, Token
from support.http_endpoint import ROW_SUMS, endpoint

RIGHT = [[1, 2, 3], [4, 5, 6]]


def hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def ask(settings: HttpSettings, headers: Any, path: str = "/predict") -> httpx.Response:
    async def asking() -> httpx.Response:
        async with endpoint(settings=settings) as asked:
            if path == "/predict":
                return await asked.predict(RIGHT, headers=headers)
            return await asked.client.get(path, headers=headers)

    return asyncio.run(asking())


WITH_TOKEN = HttpSettings(tokens=Tokens((Token(hashed("right"), "somebody"),)))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_right_token_passes(scheme: str) -> None:
    assert ask(WITH_TOKEN, {"Authorization": f"{scheme} right"}).status_code == 200


@pytest.mark.parametrize(
    "sent", [None, "", "right", "Bearer wrong", "Bearer", "Basic right", "Bearer " + hashed("right")]
)
def test_no_token_and_wrong_ones_are_401_with_a_challenge(sent: str | None) -> None:
    answer = ask(WITH_TOKEN, {} if sent is None else {"Authorization": sent.encode("latin-1")})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith('Bearer realm="orchestray"')
    told = "Send a token: Authorization: Bearer <token>." if sent is None else "The token is not valid."
    assert answer.json()["error"] == told
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "path",
    [
        *("/metrics", "/models", "/openapi.json", "/live"),
        *("/v2", "/v2/models/sums", "/v2/models/ready", "/v2/models/sums/versions/ready", "/v2/models/sums/ready/"),
    ],
)
def test_what_tells_of_the_models_needs_the_token(path: str) -> None:
    assert ask(WITH_TOKEN, {}, path).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        *("/ping", "/v2/health/live", "/v2/health/ready", "/", "/docs"),
        *("/v2/models/sums/ready", "/v2/models/sums/versions/1/ready"),
    ],
)
def test_health_routes_and_the_empty_page_stay_open(path: str) -> None:
    assert ask(WITH_TOKEN, {}, path).status_code == 200


@pytest.mark.parametrize("path", ["/v2/models/summs/ready", "/v2/models/sums/versions/9/ready"])
def test_who_has_no_token_is_not_told_which_models_there_are_by_asking_for_one_that_is_not(path: str) -> None:
    answer = ask(WITH_TOKEN, {}, path)
    assert answer.status_code == 404
    assert answer.json()["error"] == "There is no such model, or not in that version."
    assert "sums" in ask(HttpSettings(), {}, path).json()["error"], "where everybody may know"


def test_a_token_is_asked_for_before_the_body_is_read() -> None:
    async def never() -> Any:
        raise AssertionError("the body was read")
        yield b""

    async def asking() -> httpx.Response:
        async with endpoint(settings=WITH_TOKEN) as asked:
            return await asked.client.post("/predict", content=never())

    assert asyncio.run(asking()).status_code == 401


def test_tokens_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    lines = (
        f"\ufeff# ours\r\n\n{hashed('a')}\n{hashed('b').upper()} team-b rate=2.5\n"  # as editors of Windows write it
    )
    file.write_text(lines, encoding="utf-8")
    tokens = Tokens.load(file, {"ORCHESTRAY_TOKEN": "c"})
    names = {token: tokens.check(f"Bearer {token}".encode()) for token in "abc"}
    assert [each.name for each in names.values() if each] == ["line-3", "team-b", "environment"]
    assert names["b"] is not None
    assert names["b"].rate_limit_per_s == 2.5
    assert not Tokens.load(None, {})
    assert Tokens.load(None, {}).check(None) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no token"),
        ("my-secret-token\n", "tokens:1: wanted the SHA-256 of a token"),
        (f"{'0' * 64} robot rate=0.0\n", "tokens:1: rate: must be > 0"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_of_tokens_is_said_without_showing_its_lines(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=told) as raised:
        Tokens.load(file, {})
    assert "my-secret" not in str(raised.value)


def test_an_empty_token_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="ORCHESTRAY_TOKEN: is set, but empty"):
        Tokens.load(None, {"ORCHESTRAY_TOKEN": " "})


def test_a_token_is_held_to_its_rate_over_time() -> None:
    limits, token = RateLimits(per_s=2.0), Token("x", "x")
    refused: list[HttpProblem] = []
    for tick in range(1000):  # 10 s, 100 requests a second
        try:
            limits.take(token, tick / 100)
        except HttpProblem as problem:
            refused.append(problem)
    assert all(problem.status == 429 and 0 < problem.more["retry_after_s"] <= 0.5 for problem in refused)
    assert 1000 - len(refused) == 21  # the two a full bucket holds, then two a second


def test_one_token_over_its_rate_is_429_and_others_are_not() -> None:
    tokens = Tokens(
        (
            Token(hashed("a"), "a", rate_limit_per_s=0.001),
            Token(hashed("b"), "b"),
        )
    )

    async def asking() -> list[httpx.Response]:
        async with endpoint(settings=HttpSettings(tokens=tokens)) as asked:
            return [await asked.predict(RIGHT, headers={"Authorization": f"Bearer {token}"}) for token in "aabb"]

    answers = asyncio.run(asking())
    assert [answer.status_code for answer in answers] == [200, 429, 200, 200]
    assert 900 < int(answers[1].headers["retry-after"]) <= 1000


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("abc-123", True), ("a" * 128, True), ("a" * 129, False), ("two words", False), ('quo"te', False), ("", False)],
)
def test_the_id_of_a_request_is_taken_over_if_it_is_sane(sent: str, kept: bool) -> None:
    given = ask(HttpSettings(), {"X-Request-Id": sent}).headers["x-request-id"]
    assert (given == sent) is kept
    assert given


def test_the_log_has_a_line_of_json_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="orchestray.serving.access"):
        ask(WITH_TOKEN, {"Authorization": "Bearer right", "X-Request-Id": "abc"})
        ask(WITH_TOKEN, {"Authorization": "Bearer wrong"})
    right, wrong = (json.loads(record.getMessage()) for record in caplog.records)
    assert {
        "request_id": "abc",
        "status": 200,
        "model": "sums",
        "version": "1",
        "token": "somebody",
    }.items() <= right.items()
    assert right["ms"] > 0
    assert (wrong["status"], wrong["path"], wrong["method"]) == (401, "/predict", "POST")
    assert "wrong" not in caplog.text


def test_the_log_can_be_had_on_a_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, stream = logging.getLogger(ACCESS_LOGGER), io.StringIO()
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    log_access_to(stream)
    log_access_to(stream)  # twice is once
    try:
        ask(HttpSettings(), {})
    finally:
        logger.setLevel(logging.NOTSET)
    assert [json.loads(line)["status"] for line in stream.getvalue().splitlines()] == [200]


def test_what_a_model_raised_is_in_the_log_under_the_id_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(samples: Any) -> Any:
        raise RuntimeError("secret of the model")

    async def asking() -> httpx.Response:
        async with endpoint((ROW_SUMS, broken)) as asked:
            return await asked.predict(RIGHT, headers={"X-Request-Id": "the-id"})

    assert asyncio.run(asking()).status_code == 500
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR and "the-id" in record.message]
    assert record.exc_info is not None
    assert "secret of the model" in caplog.text


def test_no_page_of_another_site_may_read_answers() -> None:
    answer = ask(HttpSettings(), {"Origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in answer.headers


def test_limits_that_let_nothing_through_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_body_bytes: must be > 0, got 0"):
        HttpSettings(max_body_bytes=0)


def test_pages_of_origins_that_are_named_may_ask_from_a_browser_with_a_token() -> None:
    origin = "https://page.example"
    settings = HttpSettings(tokens=WITH_TOKEN.tokens, cors_origins=(origin,))
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}

    async def asking() -> list[httpx.Response]:
        async with endpoint(settings=settings) as asked:
            asks = [
                await asked.client.options("/predict", headers={"origin": each, **wish})
                for each in (origin, "https://other.example")
            ]
            mine = {"origin": origin, "authorization": "Bearer right"}
            return [
                *asks,
                await asked.predict(RIGHT, headers=mine),
                await asked.predict(RIGHT, headers={"origin": origin}),
            ]

    asked, by_others, answered, refused = asyncio.run(asking())
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, origin)
    assert by_others.status_code == 400
    assert [answer.status_code for answer in (answered, refused)] == [200, 401]
    assert {answer.headers["access-control-allow-origin"] for answer in (answered, refused)} == {origin}
    assert "x-request-id" in answered.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in ask(HttpSettings(), {"origin": origin}).headers
