"""The end of an endpoint: it ends all it has started, also where a part of it fails, or it ends as it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.application.model_loader import Starters
from orchestray.serving.batching import Batcher, Greedy
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.config.schema import ModelSection, ServeConfig
from orchestray.serving.routing.endpoint import ModelVersion
from support.http_endpoint import ROW_SUMS, row_sums
from support.patience import PATIENCE_S
from support.served import written_run


class Starter(Starters):
    """A starter of versions that answer; each waits for `before`, and ends with `after`."""

    def __init__(self, before: Callable[[str], Any] | None = None, after: Callable[[str], Any] | None = None) -> None:
        self._before, self._after = before, after

    async def start(self, model: ModelSection, config: ServeConfig) -> ModelVersion:
        if self._before is not None:
            await self._before(model.name)

        async def end() -> None:
            if self._after is not None:
                await self._after(model.name)

        batcher: Batcher[Any, Any] = Batcher(policy=Greedy())
        batcher.add_runner(row_sums)
        return ModelVersion(ROW_SUMS, batcher, end)

    def content(self, model: ModelSection) -> str:
        return ""


class Spans:
    """A set of spans that notes that it is closed."""

    is_closed = False

    async def close(self) -> None:
        self.is_closed = True


def endpoint_of(run: Path, starter: Starter) -> LiveEndpoint:
    models = [{"name": name, "run": str(run)} for name in ("one", "two")]
    config = load_serve_config({"name": "endpoint", "models": models})
    return LiveEndpoint(config, make_starters=lambda _: starter)


def test_spans_are_sent_also_where_one_of_them_fails_in_its_end(tmp_path: Path) -> None:
    ended: list[str] = []

    async def fails(name: str) -> None:
        ended.append(name)
        raise RuntimeError(f"{name} does not end")

    async def scenario() -> None:
        starter = Starter(after=fails)
        live = endpoint_of(written_run(tmp_path), starter)
        spans = live._spans = Spans()  # type: ignore[assignment]
        await live.start()
        live.prepare_to_end()
        with pytest.raises(RuntimeError, match="does not end"):
            await live.close()
        assert (sorted(ended), spans.is_closed) == (["one", "two"], True)

    asyncio.run(scenario())


def test_a_start_that_is_ended_ends_the_versions_that_were_there_already(tmp_path: Path) -> None:
    ended: list[str] = []

    async def scenario() -> None:
        begun, never = asyncio.Event(), asyncio.Event()

        async def second_hangs(name: str) -> None:
            if name == "two":
                begun.set()
                await never.wait()

        async def noted(name: str) -> None:
            ended.append(name)

        live = endpoint_of(written_run(tmp_path), Starter(second_hangs, noted))
        starting = asyncio.create_task(live.start())
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        await asyncio.sleep(0)  # the first is there
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert ended == ["one"]
        await live.close()

    asyncio.run(scenario())
