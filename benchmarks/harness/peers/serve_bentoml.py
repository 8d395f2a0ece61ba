"""The peer of serving: BentoML, one worker; `bentoml serve serve_bentoml:Peer` with SERVE_SPEC in the environment."""

from __future__ import annotations

import json
import os

import bentoml
import numpy as np
import torch

from serve.serving_model import Timed

SPEC = json.loads(os.environ["SERVE_SPEC"])
_MAX_LATENCY_MS = 60_000  # its default; a lower one makes it refuse requests


class _Served:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = Timed(SPEC["a_s"], SPEC["c_s"])

    def _run(self, inputs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return self._model(torch.from_numpy(np.asarray(inputs, dtype=np.float32))).numpy()


if SPEC["batched"]:

    @bentoml.service(workers=1, traffic={"timeout": 60})
    class Peer(_Served):
        @bentoml.api(batchable=True, max_batch_size=SPEC["max_batch_size"], max_latency_ms=_MAX_LATENCY_MS)
        def predict(self, inputs: np.ndarray) -> np.ndarray:
            return self._run(inputs)

else:

    @bentoml.service(workers=1, traffic={"timeout": 60})
    class Peer(_Served):
        @bentoml.api
        async def predict(self, inputs: list[float]) -> list[float]:
            return self._run(np.asarray([inputs]))[0].tolist()
