"""The peer of serving: Ray Serve as its documentation has it. Usage: serve_ray.py SPEC.json; runs until Ctrl-C.

kind: "batch": `@serve.batch` with its default timeout and an asynchronous handler, as one writes it for a model on an
accelerator; "plain": no batching; "routing": two replicas behind Serve's own routing, each with a `Batcher` of ours.
Their HTTP front is a plain FastAPI application: only the routing differs from ours.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch
import uvicorn
from fastapi import FastAPI, Request
from ray import serve

from serve.serving_model import Timed

SPEC = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")) if len(sys.argv) > 1 else {}
MANY = 10_000


class Model:
    """The model on a thread of its own."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self._model = Timed(spec["a_s"], spec["c_s"])
        self._thread = ThreadPoolExecutor(1)

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        with torch.inference_mode():
            outputs: list[Any] = self._model(torch.tensor(samples)).tolist()
        return outputs

    async def aside(self, samples: Sequence[Any]) -> list[Any]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self, samples)


def batch(spec: dict[str, Any]) -> Any:
    @serve.deployment(max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 1})
    class Batched:
        def __init__(self) -> None:
            self._model = Model(spec)

        @serve.batch(max_batch_size=spec["max_batch_size"])
        async def predict(self, samples: list[Any]) -> list[Any]:
            return await self._model.aside(samples)

        async def __call__(self, request: Any) -> dict[str, Any]:
            return {"outputs": await self.predict((await request.json())["inputs"])}

    return Batched.bind()


def plain(spec: dict[str, Any]) -> Any:
    @serve.deployment(max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 1})
    class Plain:
        def __init__(self) -> None:
            self._model = Model(spec)

        async def __call__(self, request: Any) -> dict[str, Any]:
            return {"outputs": self._model([(await request.json())["inputs"]])[0]}

    return Plain.bind()


def replicas(spec: dict[str, Any]) -> Any:
    @serve.deployment(num_replicas=spec["replicas"], max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 0.5})
    class Replica:
        def __init__(self) -> None:
            from orchestray.serving.batching import Batcher

            self._batcher: Batcher[Any, Any] = Batcher(max_batch_size=spec["max_batch_size"], max_queue=MANY)
            self._batcher.add_runner(Model(spec).aside)

        async def __call__(self, sample: Any) -> Any:
            return await self._batcher.submit(sample)

    return Replica.bind()


def front(handle: Any, port: int) -> None:
    """Run a FastAPI application in this process that asks the replicas through Serve's routing."""
    app = FastAPI()

    @app.post("/")
    async def predict(request: Request) -> dict[str, Any]:
        return {"outputs": await handle.remote((await request.json())["inputs"])}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", loop="uvloop", http="httptools")


def main() -> None:
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    port = SPEC["port"]
    if SPEC["kind"] == "routing":
        # The port of its proxy is not used: the front is this process.
        serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "ERROR"})
        front(serve.run(replicas(SPEC), name="peer", route_prefix=None), port)
        return
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    serve.run({"batch": batch, "plain": plain}[SPEC["kind"]](SPEC), name="peer", route_prefix="/")
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    over.wait()
    serve.shutdown()


if __name__ == "__main__":
    main()
