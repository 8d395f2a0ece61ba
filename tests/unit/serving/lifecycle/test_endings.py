"""The end of an endpoint: it ends all it has started, also where a part of it fails, or it ends as it starts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.application.model_loader import InProcess
from orchestray.serving.batching import Batcher, Greedy
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.config.schema import ModelSection, ServeConfig
from orchestray.serving.routing.endpoint import ModelVersion
from support.http_endpoint import ROW_SUMS, row_sums
from support.patience import PATIENCE_S
from support.served import written_run

CLOSED_BEFORE_IT_JOINED = """
import asyncio, sys
from orchestray.serving.config.load import load_serve_config
from orchestray.platform.errors import ConfigError
from orchestray.serving.lifecycle.fronts import FrontedEndpoint

async def main():
    models = [{"name": "digits", "run": sys.argv[1]}]
    live = FrontedEndpoint(load_serve_config({"name": "refused", "models": models, "http": {"fronts": 2}}), 0)
    try:
        await live.start()
    except ConfigError as error:
        print(error)
    await live.close()

asyncio.run(main())
ray = sys.modules.get("ray")
print("Ray runs" if ray is not None and ray.is_initialized() else "no Ray")
"""


class Starter(InProcess):
    """A starter of versions that answer; each waits for `before`, and ends with `after`."""

    def __init__(self, before: Callable[[str], Any] | None = None, after: Callable[[str], Any] | None = None) -> None:
        self._before, self._after = before, after
        self.is_closed = False

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

    @property
    def address(self) -> str | None:
        return None

    def move(self, address: str | None) -> bool:
        return False

    async def close(self) -> None:
        self.is_closed = True


class Tracer:
    """A tracer that notes that it is closed."""

    is_closed = False

    async def close(self) -> None:
        self.is_closed = True


def endpoint_of(run: Path, starter: Starter) -> LiveEndpoint:
    models = [{"name": name, "run": str(run)} for name in ("one", "two")]
    config = load_serve_config({"name": "endpoint", "models": models})
    return LiveEndpoint(config, make_starter=lambda _: starter)


def test_what_versions_shared_is_let_go_of_also_where_one_of_them_fails_in_its_end(tmp_path: Path) -> None:
    ended: list[str] = []

    async def fails(name: str) -> None:
        ended.append(name)
        raise RuntimeError(f"{name} does not end")

    async def scenario() -> None:
        starter = Starter(after=fails)
        live = endpoint_of(written_run(tmp_path), starter)
        tracer = live._tracer = Tracer()  # type: ignore[assignment]
        await live.start()
        live.prepare_to_end()
        with pytest.raises(RuntimeError, match="does not end"):
            await live.close()
        assert (sorted(ended), starter.is_closed, tracer.is_closed) == (["one", "two"], True, True)

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


def test_an_endpoint_that_is_refused_before_it_has_joined_a_cluster_starts_none_as_it_ends(tmp_path: Path) -> None:
    run = written_run(tmp_path)
    with (run / "config.yaml").open("a") as file:
        file.write("strategy: {network: {pipeline: 2}}\n")
    code = [sys.executable, "-c", CLOSED_BEFORE_IT_JOINED, str(run)]
    told = subprocess.run(code, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout.splitlines()
    assert "http.fronts" in told[0]
    assert told[-1] == "no Ray"
