"""The ports where replicas and fronts report: whatever strangers send there, they are let go, and nothing is logged."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from orchestray.serving.replicas.directory import Directory
from orchestray.serving.replicas.pool import ReplicaPool
from support.patience import PATIENCE_S


def greeting(secret: object = "", tensors: Sequence[Any] = ()) -> str:
    return json.dumps({"secret": secret, "tensors": tensors})


@pytest.mark.parametrize("kind", [ReplicaPool, Directory])
@pytest.mark.parametrize(
    "header",
    [
        greeting("d\u00e9j\u00e0"),
        greeting("\ud800"),
        greeting(5),
        greeting(),
        greeting(tensors=[[["a", "float32", [2**70]]]]),
        greeting(tensors=[[["a", "(0 1)f4", [1]]]]),
        "[" * 100_000,
        "[]",
        "{",
    ],
    ids=["not ascii", "half a character", "no text", "none", "vast", "odd type", "deep", "no object", "no JSON"],
)
def test_a_stranger_is_let_go_and_the_log_says_nothing(
    kind: type[ReplicaPool | Directory], header: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        listening = kind()
        port = await listening.listen("127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(struct.pack("!IQ", len(header), 0) + header.encode())
        assert await reader.read() == b""
        writer.close()
        await listening.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert caplog.records == []
