"""Work of one event loop in that of a thread: results, errors, and ASGI requests that are answered in parts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from orchestray.serving.application.loop_thread import LoopThread


def test_a_call_runs_in_the_thread_and_its_result_or_error_comes_back() -> None:
    async def name() -> str:
        return threading.current_thread().name

    async def fails() -> None:
        raise ValueError("no")

    async def scenario() -> None:
        thread = LoopThread("apart")
        assert await thread.call(name()) == "apart"
        with pytest.raises(ValueError, match="no"):
            await thread.call(fails())
        thread.end()

    asyncio.run(scenario())


def test_a_request_of_another_loop_is_received_and_answered_there_in_order() -> None:
    async def app(_scope: Any, receive: Any, send: Any) -> None:
        assert threading.current_thread().name == "apart"
        await send({"status": 200})
        while (message := await receive())["more_body"]:
            await send(message)
        await send(message)

    async def scenario() -> None:
        here = threading.get_ident()
        coming = iter([{"body": number, "more_body": number < 3} for number in range(4)])
        sent = []

        async def receive() -> Any:
            assert threading.get_ident() == here
            return next(coming)

        async def send(message: Any) -> None:
            assert threading.get_ident() == here
            sent.append(message)

        thread = LoopThread("apart")
        await thread.bridge(app, {"type": "http"}, receive, send)
        assert sent == [{"status": 200}, *({"body": number, "more_body": number < 3} for number in range(4))]
        thread.end()

    asyncio.run(scenario())
