"""Whole graphs compiled to machine code by torch.compile, beside torch's operators called one by one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import quiet_profiler, seeded, times_s


class Chain(nn.Module):
    """A chain of elementwise operations, and a normalisation: [samples, width].

    Args:
        width: numbers of a sample.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.tanh(x) * torch.sigmoid(x) + 0.5 * x * x - x.abs())
        return out


class Perceptron(nn.Sequential):
    """Two layers with GELU between them: [samples, width].

    Args:
        width: numbers of a sample; the hidden layer has four times as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Recurrence(nn.Module):
    """Steps of an LSTM, written out; returns its last state: [steps, samples, width].

    Args:
        width: numbers of a sample at a step, and of its state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.states = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = torch.zeros_like(x[0])
        for gates in self.inputs(x):
            keep, write, new, show = (gates + self.states(state)).chunk(4, dim=-1)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(write) * torch.tanh(new)
            state = torch.sigmoid(show) * torch.tanh(cell)
        return state


@dataclass(frozen=True)
class Graph:
    """A model, and the shape of its inputs.

    Args:
        kind: class of the model.
        shape: shape of the inputs; the last number is the model's width.
    """

    kind: Callable[[int], nn.Module]
    shape: tuple[int, ...]


GRAPHS: Mapping[str, Graph] = {
    "elementwise chain, normalisation": Graph(Chain, (256, 1024)),
    "perceptron with GELU": Graph(Perceptron, (64, 256)),
    "LSTM, 4 steps": Graph(Recurrence, (4, 16, 64)),
}

_OPTIONS: Mapping[str, Any] = {
    "cpp.enable_kernel_profile": True,  # a profile then names each fused kernel
    "cpp_cache_precompile_headers": False,  # they take longer than they save for as few graphs
}


def compiled(rounds: int = 20, graphs: Mapping[str, Graph] = GRAPHS) -> Exhibit:
    """Compare each graph by torch's operators with the compiled one.

    Nothing that was compiled before is used, and nothing is kept.

    Args:
        rounds: rounds of the timings.
        graphs: the graphs by name.

    Raises:
        ConfigError: there is no C++ compiler.
        OrchestrayError: a graph cannot be compiled.
    """
    compiler = find_compiler()
    with torch.no_grad(), _empty_cache():
        started_s, _ = _compiled(nn.Tanh(), torch.zeros(1), compiler)
        rows = [[name, *_measured(graph, compiler, rounds)] for name, graph in graphs.items()]
    columns = [
        *("graph", "operators called", "compiled: kernels called", "eager, ms", "compiled, ms", "eager / compiled"),
        *("compiling, s", "largest difference"),
    ]
    findings = [_finding(row) for row in rows]
    findings.append(f"The compiler itself took {started_s:.2g} s to start, before the first graph.")
    findings.append(f"Outputs differ by {max(row[-1] for row in rows):.1g} at most.")
    return Exhibit("compiled", "Whole graphs compiled by torch.compile", columns, rows, findings)


def _measured(graph: Graph, compiler: str, rounds: int) -> list[Any]:
    torch.manual_seed(0)
    model, x = graph.kind(graph.shape[-1]).eval(), seeded(*graph.shape)
    compile_s, run = _compiled(model, x, compiler)
    off = float((run(x) - model(x)).abs().max())
    ways = {"eager": partial(model, x), "compiled": partial(run, x)}
    calls = [num_calls(way) for way in ways.values()]
    eager_s, compiled_s = (median(taken) for taken in times_s(ways, rounds).values())
    return [*calls, eager_s * 1e3, compiled_s * 1e3, eager_s / compiled_s, compile_s, off]


def find_compiler() -> str:
    """Return the C++ compiler that torch.compile uses.

    Raises:
        ConfigError: it is not there.
    """
    name = os.environ.get("CXX") or "g++"
    if shutil.which(name) is None:
        raise ConfigError(
            f"torch.compile makes C++ of a graph, and there is no compiler {name!r} here for it. "
            "Install one (on Debian: apt-get install g++), or name another one in the environment variable CXX."
        )
    return name


def num_calls(compute: Callable[[], Any]) -> int:
    """Return how many operators and fused kernels a computation calls; those inside others are not counted."""
    with quiet_profiler() as seen:
        compute()
    return sum(_is_call(event) and not _is_inside(event) for event in seen.events())


def _is_call(event: Any) -> bool:
    return event.name.startswith("aten::") or "cpp_fused" in event.name


def _is_inside(event: Any) -> bool:
    parent = event.cpu_parent
    return parent is not None and (_is_call(parent) or _is_inside(parent))


def _compiled(model: nn.Module, x: Tensor, compiler: str) -> tuple[float, Callable[[Tensor], Tensor]]:
    """Return the seconds that the first call takes longer than the second, and the compiled model."""
    run: Any = torch.compile(model, fullgraph=True, dynamic=False, options=dict(_OPTIONS))
    began_s = perf_counter()
    try:
        run(x)
    except RuntimeError as error:
        text = str(error).partition("\n\nSet TORCH")[0]  # what follows is for torch's developers
        raise OrchestrayError(f"{compiler!r} did not compile what torch.compile made of a graph: {text}") from error
    first_s, began_s = perf_counter() - began_s, perf_counter()
    run(x)
    return first_s - (perf_counter() - began_s), run


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Have torch.compile begin with nothing, and keep what it makes in a folder that is removed at the end."""
    torch.compiler.reset()
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


def _finding(row: list[Any]) -> str:
    name, calls, fewer, eager_ms, compiled_ms, ratio, compile_s, _ = row
    said = f"{name}: {calls} calls become {fewer}; compiled it is {ratio:.2g} times as fast"
    if compiled_ms >= eager_ms:
        return f"{said}, which never pays for the compiling."
    return f"{said}, which pays for the compiling after {compile_s * 1e3 / (eager_ms - compiled_ms):,.0f} batches."
