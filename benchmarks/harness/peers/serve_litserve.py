"""The peer of serving: LitServe, one worker and one API server. Usage: serve_litserve.py SPEC.json; until Ctrl-C."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import litserve as ls
import torch

from serve.serving_model import Timed


class Peer(ls.LitAPI):
    """The model."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(max_batch_size=spec["max_batch_size"], batch_timeout=spec["timeout_s"])
        self._told = spec

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self._model = Timed(self._told["a_s"], self._told["c_s"])

    # Annotations of these two would be taken for types that bodies are checked against.
    def decode_request(self, request):
        return torch.tensor(request["inputs"])

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(inputs if inputs.ndim == 2 else inputs[None])

    def encode_response(self, outputs: torch.Tensor):
        return {"outputs": outputs.flatten().tolist()}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    server = ls.LitServer(Peer(spec), accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(
        host="127.0.0.1",
        port=spec["port"],
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
