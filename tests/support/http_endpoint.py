"""An endpoint over HTTP in this process: the real application, batcher and registry, over functions on batches."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
from fastapi import APIRouter, FastAPI
from torch import nn

from orchestray.serving.batching import Batcher, Greedy
from orchestray.serving.config.schema import HttpSection
from orchestray.serving.generation.router import make_generate_router
from orchestray.serving.http import HttpSettings, Monitor, make_app
from orchestray.serving.http.overload.shedding import LoadShedder
from orchestray.serving.http.server.http_server import HttpServer
from orchestray.serving.models.signature import Output, Sample, Signature, TensorSpec
from orchestray.serving.routing.endpoint import ModelVersion, Share
from orchestray.serving.routing.registry import Registry
from orchestray.serving.runtime.event_loop import FineLoop
from support.generation import engine_of
from support.patience import PATIENCE_S

Run = Callable[[Sequence[Sample]], Awaitable[Sequence[Output | Exception]]]

_LONGEST_S = PATIENCE_S
"""A test that hangs fails."""

ROW_SUMS = Signature(
    "sums",
    "1",
    (TensorSpec("inputs", "float32", (2, 3)),),
    (TensorSpec("outputs", "float32", (2,)),),
    [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
)
PAIR = Signature(
    "pair",
    "1",
    (TensorSpec("left", "float32", (2,)), TensorSpec("right", "int64", ())),
    (TensorSpec("product", "float32", (2,)), TensorSpec("is_large", "bool", ())),
    {"left": [1.0, 2.0], "right": 3},
)


async def row_sums(samples: Sequence[Sample]) -> list[Output | Exception]:
    return [{"outputs": sample["inputs"].sum(axis=1)} for sample in samples]


async def pair(samples: Sequence[Sample]) -> list[Output | Exception]:
    with np.errstate(over="ignore"):
        products = [sample["left"] * np.float32(sample["right"]) for sample in samples]
    return [{"product": each, "is_large": np.bool_(each.sum() > 100)} for each in products]


class Held:
    """A function on batches that answers when it is let go."""

    def __init__(self, run: Run = row_sums) -> None:
        self._run = run
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.batches: list[int] = []

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Output | Exception]:
        self.batches.append(len(samples))
        self.started.set()
        await self.go.wait()
        return await self._run(samples)


def version_of(signature: Signature, run: Run, monitor: Monitor | None = None, **batching: Any) -> ModelVersion:
    listener = None if monitor is None else monitor.listener(signature.name, signature.version)
    batcher: Batcher[Sample, Output] = Batcher(policy=Greedy(), listener=listener, **batching)
    batcher.add_runner(run)
    return ModelVersion(signature, batcher)


class Asked:
    """The endpoint, and a client of it."""

    def __init__(self, app: FastAPI, registry: Registry, monitor: Monitor) -> None:
        self.app, self.registry, self.monitor = app, registry, monitor
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://endpoint")

    async def predict(self, inputs: Any, **more: Any) -> httpx.Response:
        return await self.client.post("/predict", json={"inputs": inputs}, **more)

    @property
    def batcher(self) -> Batcher[Sample, Output]:
        return self.registry.default.main.batcher


@asynccontextmanager
async def endpoint(
    *models: tuple[Signature, Run],
    settings: HttpSettings | None = None,
    routers: Sequence[APIRouter] = (),
    text: nn.Module | None = None,
    **batching: Any,
) -> AsyncIterator[Asked]:
    """Serve models (default: the sums of rows), each in its one version; with the first, `text` is generated."""
    monitor, registry = Monitor(), Registry()
    registry.update(
        {
            signature.name: [Share(version_of(signature, run, monitor, **batching))]
            for signature, run in models or ((ROW_SUMS, row_sums),)
        }
    )
    if text is not None:
        routers = [*routers, make_generate_router(registry)]
    asked = Asked(make_app(registry, settings, monitor=monitor, routers=routers), registry, monitor)
    try:
        async with asyncio.timeout(_LONGEST_S), asked.client, contextlib.AsyncExitStack() as stack:
            if text is not None:
                registry.default.main.generator = await stack.enter_async_context(engine_of(text))
            yield asked
    finally:
        await registry.close(drain=False)


@contextlib.contextmanager
def listening(
    *models: tuple[Signature, Run],
    settings: HttpSettings | None = None,
    http: HttpSection | None = None,
    text: nn.Module | None = None,
) -> Iterator[str]:
    """Serve such an endpoint on a socket, by the server of `orchestray serve` in a thread, and yield its URL."""
    http = http or HttpSection()
    started = threading.Event()
    stop: list[Callable[[], None]] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            async with endpoint(*models, settings=settings, text=text) as asked:
                shedding = LoadShedder(asked.monitor, settings or HttpSettings(), asked.registry)
                server = HttpServer(asked.app, listener, http, shedding=shedding)
                ended = asyncio.Event()
                await server.start()
                stop.append(lambda: loop.call_soon_threadsafe(ended.set))
                started.set()
                await ended.wait()
                asked.monitor.live.close()
                await server.stop()

        def run() -> None:
            with asyncio.Runner(loop_factory=FineLoop) as runner:
                runner.run(serve())

        port, scheme = listener.getsockname()[1], "http" if http.tls.certificate is None else "https"
        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(PATIENCE_S)
        try:
            yield f"{scheme}://127.0.0.1:{port}"
        finally:
            stop[0]()
            thread.join()
