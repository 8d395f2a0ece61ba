"""The peer of the parameter server: the asynchronous one of Ray's documentation, with the same model.

https://docs.ray.io/en/latest/ray-core/examples/plot_parameter_server.html. A server actor holds the model and
`torch.optim.SGD`. Workers are actors; weights and gradients are object references. A driver hands the server each
gradient that is ready, and its worker the weights that come out.

Usage: ray_parameter_server.py SPEC.json OUT.json
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def make_model(spec: dict[str, Any]) -> nn.Module:
    """Return the model, the same on both sides and in every process."""
    torch.manual_seed(0)
    width = spec["width"]
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, width, bias=False))


def make_batch(spec: dict[str, Any], rank: int) -> tuple[Tensor, Tensor]:
    """Return a worker's samples: few, so that the exchange is what takes the time."""
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (spec["samples"], spec["width"])
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def gradient_of(model: nn.Module, batch: tuple[Tensor, Tensor], begin: Callable[[], None]) -> None:
    """Compute the gradient into the parameters' `.grad`."""
    begin()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()


def main() -> None:
    import ray

    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

    @ray.remote(num_cpus=0)
    class Server:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self._model = make_model(spec)
            self._optimizer = torch.optim.SGD(self._model.parameters(), lr=spec["lr"])
            self._times: list[float] = []

        def weights(self) -> dict[str, Tensor]:
            return {name: tensor.cpu() for name, tensor in self._model.state_dict().items()}

        def apply(self, gradients: list[Any]) -> dict[str, Tensor]:
            self._optimizer.zero_grad()
            for parameter, gradient in zip(self._model.parameters(), gradients, strict=True):
                parameter.grad = torch.tensor(gradient)
            self._optimizer.step()
            self._times.append(time.perf_counter())
            return self.weights()

        def found(self) -> dict[str, Any]:
            return {"times": [at - self._times[0] for at in self._times]}

    @ray.remote(num_cpus=0)
    class Worker:
        def __init__(self, rank: int) -> None:
            torch.set_num_threads(1)
            self._model = make_model(spec)
            self._batch = make_batch(spec, rank)

        def gradient(self, weights: dict[str, Tensor]) -> list[Any]:
            self._model.load_state_dict(weights)
            gradient_of(self._model, self._batch, self._model.zero_grad)
            return [parameter.grad.data.cpu().numpy() for parameter in self._model.parameters()]  # type: ignore[union-attr]

    ray.init("local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    server = Server.remote()
    workers = [Worker.remote(rank) for rank in range(spec["workers"])]
    weights = server.weights.remote()
    under_way = {worker.gradient.remote(weights): worker for worker in workers}
    for _ in range(spec["updates"]):
        ready, _ = ray.wait(list(under_way))
        worker = under_way.pop(ready[0])
        weights = server.apply.remote(ready[0])
        under_way[worker.gradient.remote(weights)] = worker
    found = ray.get(server.found.remote())
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    ray.shutdown()


if __name__ == "__main__":
    main()
