"""The page at `/` of an endpoint, in a real browser: a digit is drawn, and its batches are watched."""

from __future__ import annotations

import asyncio
import hashlib
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import uvicorn

from orchestray.serving.batching import Batcher
from orchestray.serving.generation.decoder import TransformerDecoder
from orchestray.serving.generation.engine import Engine
from orchestray.serving.generation.router import make_generate_router
from orchestray.serving.http import HttpSettings, Monitor, Tokens, make_app
from orchestray.serving.http.auth import Token
from orchestray.serving.models.served import ServedModel
from orchestray.serving.replicas.in_process import in_process
from orchestray.serving.routing.endpoint import Share
from orchestray.serving.routing.registry import Registry
from orchestray.trainers.tasks.digits import Digits
from support.browser import watched
from support.generation import small_model
from support.http_endpoint import PAIR, ROW_SUMS, pair, row_sums, version_of
from support.patience import PATIENCE_S


@pytest.fixture(scope="module")
def digits() -> ServedModel:
    """Return a network that has learnt digits, a little."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    task = Digits(hidden=[64])
    model, batch = task.build_model(), task.to_batch(task.dataset("train"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        task.loss(model(batch["inputs"]), batch).backward()
        optimizer.step()
    return ServedModel(model, task.example_inputs(), name="digits")


@contextmanager
def served(digits: ServedModel, settings: HttpSettings | None = None) -> Iterator[str]:
    """Serve digits and another model on a socket, in a thread; yield the URL."""
    started, stop = threading.Event(), list[Callable[[], None]]()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)

        async def serve() -> None:
            loop, monitor, registry = asyncio.get_running_loop(), Monitor(), Registry()
            batcher: Batcher[Any, Any] = Batcher(listener=monitor.listener("digits", "1"))
            text = version_of(ROW_SUMS, row_sums, monitor)
            text.generator = Engine(TransformerDecoder(small_model(depth=1)), num_threads=1)
            registry.update(
                {
                    "digits": [Share(in_process(digits, batcher))],
                    "pair": [Share(version_of(PAIR, pair, monitor))],
                    "text": [Share(text)],
                }
            )
            app = make_app(registry, settings, monitor=monitor, routers=[make_generate_router(registry)])
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, ws="none"))

            def end() -> None:
                monitor.live.close()
                server.should_exit = True

            stop.append(lambda: loop.call_soon_threadsafe(end))
            started.set()
            await server.serve(sockets=[listener])
            await registry.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert started.wait(PATIENCE_S)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            stop[0]()
            thread.join()


@pytest.fixture(scope="module")
def url(digits: ServedModel) -> Iterator[str]:
    with served(digits) as url:
        yield url


@contextmanager
def opened(
    browser: Any, url: str, path: str = "", *, width: int = 1280, scheme: str = "light", refused: int = 0
) -> Iterator[Any]:
    """Open the page; at its end it has complained of `refused` answers alone, and sent no request elsewhere."""
    with watched(browser, (url, "data:"), width=width, height=1000, scheme=scheme) as (page, told):
        page.goto(url + path)
        yield page
        assert len(told) == refused, told


def draw(page: Any, points: list[tuple[float, float]]) -> None:
    """Draw a stroke on the pad, in parts of its sides."""
    page.locator("#pad").scroll_into_view_if_needed()
    box = page.locator("#pad").bounding_box()
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place)
    page.mouse.up()


def ellipse(width: float, height: float) -> list[tuple[float, float]]:
    turns = [2 * math.pi * step / 40 for step in range(41)]
    return [(0.5 + width * math.sin(turn), 0.5 - height * math.cos(turn)) for turn in turns]


def test_a_digit_that_is_drawn_is_told_and_its_batch_is_shown(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.wait_for_selector(".connection.is-live")
        draw(page, ellipse(0.18, 0.3))
        page.wait_for_selector(".verdict b")
        assert page.inner_text(".verdict b") == "0"
        assert page.locator(".bars meter").count() == 10
        page.wait_for_selector("#sizes rect")
        page.click("#clear")
        draw(page, [(0.5, 0.2 + step * 0.06) for step in range(11)])
        page.wait_for_selector(".verdict b >> text=/^1$/")


def test_requests_of_one_moment_share_batches(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        page.wait_for_selector(".connection.is-live")
        page.click("#burst")
        page.wait_for_selector("text=/^32 answers in/")
        page.wait_for_selector("figure:has(#sizes) output:text('up to 32')")  # the batch shows when it is done
        assert page.query_selector("#sizes rect") is not None
        assert page.inner_text("#shed") == "0"


def test_another_model_is_asked_in_json_and_its_mistakes_are_told(browser: Any, url: str) -> None:
    with opened(browser, url, refused=1) as page:
        page.select_option("#model", "pair")
        assert not page.is_visible("#pad")
        page.click("#send")
        page.wait_for_selector("#answer pre")
        assert '"product"' in page.inner_text("#answer pre")
        page.fill("#json", '{"left": [1], "right": 3}')
        page.click("#send")
        page.wait_for_selector("#answer .problem")
        assert "inputs.left: wanted float32 of shape [2], got a list of 1" in page.inner_text("#answer .problem")


def test_a_text_goes_on_token_by_token_and_what_that_took_is_shown(browser: Any, url: str) -> None:
    with opened(browser, url, width=400) as page:
        assert not page.is_visible("#text-card")
        page.select_option("#model", "text")
        page.fill("#prompt", "def ")
        page.fill("#max-tokens", "12")
        page.click("#generate")
        page.wait_for_selector("#tokens:text('12')")
        assert page.inner_text("#text b") == "def "
        assert len(page.inner_text("#text")) > len("def ")
        assert page.inner_text("#first-token").endswith(" ms")
        assert page.inner_text("#generating") == "0 + 0"
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize(
    ("width", "scheme", "background"), [(1280, "light", "rgb(246, 247, 249)"), (400, "dark", "rgb(18, 21, 26)")]
)
def test_the_page_fits_its_screen_and_follows_the_system_s_colours(
    browser: Any, url: str, width: int, scheme: str, background: str
) -> None:
    with opened(browser, url, width=width, scheme=scheme) as page:
        page.wait_for_selector(".connection.is-live")
        page.click("#show-example")
        page.wait_for_selector(".verdict b")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_token_is_asked_for_where_one_is_needed(browser: Any, digits: ServedModel) -> None:
    tokens = Tokens((Token(hashlib.sha256(b"right").hexdigest(), "somebody"),))
    with served(digits, HttpSettings(tokens=tokens)) as url, opened(browser, url, refused=2) as page:
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=This token is not valid.")
        page.fill("#token", "right")
        page.keyboard.press("Enter")
        page.wait_for_selector(".connection.is-live")
        page.click("#show-example")
        page.wait_for_selector(".verdict b")
        assert "$TOKEN" in page.text_content("#curl")


def test_the_api_is_shown_and_tried_with_nothing_from_the_network(browser: Any, url: str) -> None:
    with opened(browser, url, "docs") as page:
        page.click("#operations-default-predict .opblock-summary-control")
        page.click("#operations-default-predict .try-out__btn")
        page.click("#operations-default-predict .execute")
        page.wait_for_selector("#operations-default-predict .live-responses-table .response-col_status >> text=200")


def test_the_api_s_schema_is_behind_the_token_that_authorize_is_given(browser: Any, digits: ServedModel) -> None:
    tokens = Tokens((Token(hashlib.sha256(b"right").hexdigest(), "somebody"),))
    with served(digits, HttpSettings(tokens=tokens)) as url, opened(browser, url, "docs", refused=3) as page:
        page.wait_for_selector("text=This endpoint asks for a token")
        assert page.locator(".opblock").count() == 0
        for token, told in (("wrong", "text=The token is not valid."), ("right", "#operations-default-predict")):
            page.click(".authorize")
            if page.locator(".modal-btn >> text=Logout").count():
                page.click(".modal-btn >> text=Logout")
            page.fill(".auth-container input", token)
            page.click(".auth-btn-wrapper .authorize")
            page.click(".btn-done")
            page.wait_for_selector(told)
        page.click("#operations-default-predict .opblock-summary-control")
        page.click("#operations-default-predict .try-out__btn")
        page.click("#operations-default-predict .execute")
        page.wait_for_selector("#operations-default-predict .live-responses-table .response-col_status >> text=200")
        page.reload()
        page.wait_for_selector("#operations-default-predict")
