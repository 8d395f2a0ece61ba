"""Serving by CUDA graphs: replay is equal to eager, memory stays flat, what no graph can hold runs without."""

from __future__ import annotations

from typing import Any

from gpu.check import Place, Verdict, main

_SIZES = (1, 2, 4, 8, 16, 32)
_CLOSE = 1e-5


def run(place: Place) -> Verdict:
    """Serve a network with and without graphs, compiled with them, and one with a branch on a result."""
    import torch
    from torch import nn

    from orchestray.serving.models.served import ServedModel

    device, width = place.device(), place.sized(1024, 16)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))
    example = torch.zeros(16)
    plain = ServedModel(model, example, device=device, pad_to=_SIZES)
    graphed = ServedModel(model, example, device=device, pad_to=_SIZES, graphs=True)
    backend = "eager" if place.is_rehearsal else True
    compiled = ServedModel(model, example, device=device, pad_to=_SIZES, graphs=True, compile=backend)
    branching = ServedModel(branching_of(model), example, device=device, pad_to=_SIZES, graphs=True)
    for served in (plain, graphed, compiled, branching):
        served.warm_up(_SIZES[-1])
    samples = [plain.signature.parse(row.tolist()) for row in torch.rand(32, 16)]
    wanted = {number: _rows(plain, samples[:number]) for number in (1, 3, 8, 20, 32)}
    equal = all(torch.equal(_rows(graphed, samples[:number]), rows) for number, rows in wanted.items())
    apart = max(float((_rows(compiled, samples[:number]) - rows).abs().max()) for number, rows in wanted.items())
    fell_back = all(torch.equal(_rows(branching, samples[:number]), rows) for number, rows in wanted.items())
    recorded = graphed.signature.computing.get("cuda_graphs", [])
    says = branching.signature.computing.get("without_cuda_graph", {})
    before = _reserved(device)
    for number in range(place.sized(10_000, 20)):
        graphed.run(samples[: 1 + number % 32])
    grown = _reserved(device) - before
    holds = equal and apart <= _CLOSE and fell_back and not grown
    if not place.is_rehearsal:
        holds = holds and tuple(recorded) == _SIZES and len(says) == len(_SIZES)
        holds = holds and tuple(compiled.signature.computing["cuda_graphs"]) == _SIZES
    return Verdict(
        holds,
        f"{len(recorded)} sizes recorded (= 6), replay equal: {equal}, compiled {apart:.1e} off (<= {_CLOSE:g}), "
        f"memory grew by {grown} bytes (= 0), a branch falls back for {len(says)} sizes (= 6), equal: {fell_back}",
    )


def branching_of(model: Any) -> Any:
    """Return a model around another that looks at a result on the CPU, which no graph can hold."""
    from torch import Tensor, nn

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.model(inputs)
            return outputs if float(outputs.abs().max()) < 1e9 else -outputs

    return Branching()


def _rows(served: Any, samples: list[Any]) -> Any:
    import torch

    return torch.stack([torch.from_numpy(answer["outputs"]) for answer in served.run(samples)])


def _reserved(device: Any) -> int:
    import torch

    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    main(run)
