"""Changes to a running endpoint: who may make them, and the answer to one that fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.lifecycle.control import ControlServer, send
from orchestray.serving.lifecycle.name_lock import EndpointInfo
from support.patience import PATIENCE_S


async def refuse(replica: str) -> str:
    raise OrchestrayError(f"there is no {replica}")


def test_who_does_not_know_the_secret_changes_nothing() -> None:
    async def scenario() -> None:
        applied: list[Any] = []

        async def apply(data: dict[str, Any]) -> str:
            applied.append(data)
            return "done"

        server = ControlServer(apply, "right", refuse)
        port = await server.start()
        with pytest.raises(OrchestrayError, match="secret"):
            await asyncio.to_thread(send, EndpointInfo("e", 1, "", port, "wrong"), config={})
        assert applied == []
        there = EndpointInfo("e", 1, "", port, "right")
        assert await asyncio.to_thread(send, there, config={"name": "e"}) == "done"
        assert applied == [{"name": "e"}]
        with pytest.raises(OrchestrayError, match="there is no e-1"):
            await asyncio.to_thread(send, there, replace="e-1")
        assert applied == [{"name": "e"}]
        await server.close()

    asyncio.run(scenario())


def test_what_nobody_foresaw_is_told_to_who_asks_and_its_traceback_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async def apply(data: dict[str, Any]) -> str:
            if data["name"] == "odd":
                raise ConnectionError("the head of the cluster is gone")
            return "done"

        server = ControlServer(apply, "right", refuse)
        there = EndpointInfo("e", 1, "", await server.start(), "right")
        with pytest.raises(OrchestrayError, match=r"the change failed.*: ConnectionError: the head .* is gone") as told:
            await asyncio.to_thread(send, there, config={"name": "odd"})
        assert told.value.exit_status == 1
        assert await asyncio.to_thread(send, there, config={"name": "e"}) == "done"
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (json.dumps({"secret": "d\u00e9j\u00e0", "config": {}}), "The secret is wrong."),
        (json.dumps({"secret": "\ud800", "config": {}}), "The secret is wrong."),
        (json.dumps({"secret": None, "config": {}}), "The secret is wrong."),
        ("[" * 100_000, "This is no change of an endpoint."),
        ("", "This is no change of an endpoint."),
    ],
    ids=["not ascii", "half a character", "no text", "deep", "nothing"],
)
def test_whatever_strangers_send_they_are_answered_and_the_log_says_nothing(
    line: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async def apply(data: dict[str, Any]) -> str:
            raise AssertionError

        server = ControlServer(apply, "right", refuse)
        reader, writer = await asyncio.open_connection("127.0.0.1", await server.start())
        writer.write(line.encode() + b"\n")
        assert json.loads(await reader.readline()) == {"error": told, "exit_status": 2}
        writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert caplog.records == []
