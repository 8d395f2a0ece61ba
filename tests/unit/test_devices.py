"""The product names a GPU by its index, and asks whether there are any only where it was given one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from orchestray.platform.comm.backend import BackendKind
from support.layers import FILES, ROOT

ASKS_FOR_GPUS = {
    "trainers/survey/lab/connecting.py",  # reports what this machine has
    "platform/actors/gpus.py",  # counts them where the worker was given one
    "serving/models/device.py",  # the same for a replica of an endpoint
}
"""Files that ask torch whether there are GPUs, or how many. None may be added: back ends follow from what is given."""
_ASKS = {f"{module}.{name}" for module in ("cuda", "accelerator") for name in ("is_available", "device_count")}
MEANS_A_KIND = "platform/comm/process_groups.py"
"""Registers the back end of all GPUs: the device there is a kind."""
_WITHOUT_DEVICE = {"is_available", "is_initialized", "device_count", "current_device", "Event", "CUDAGraph"} | {
    "get_rng_state_all",
    "graph_pool_handle",
    "empty_cache",
}
"""Functions of `torch.cuda` that take no device, or return one."""
CHOOSES = "platform/comm/backend.py"
"""Chooses the back end of every process group."""
_KINDS = set(get_args(BackendKind)) - {"gloo"}
_OF_THE_CURRENT = {"torch.Stream"} | {
    f"torch.accelerator.{name}" for name in ("current_stream", "synchronize", "max_memory_allocated", "memory_stats")
}
"""Names of torch for any kind of accelerator, which mean the thread's current one without a device."""


@cache
def _nodes(source: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(source))]


def mistakes(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each place at which the thread's current GPU is meant without being named."""
    for node in _nodes(source):
        if not isinstance(node, ast.Call):
            continue
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        called = _dotted(node.func)
        if called.startswith("torch.cuda."):
            if not given and called.removeprefix("torch.cuda.") not in _WITHOUT_DEVICE:
                yield node.lineno, f"{called}() without a device"
            continue
        if called in _OF_THE_CURRENT and not given:
            yield node.lineno, f"{called}() without a device"
            continue
        name = called.rpartition(".")[2]
        if name in {"cuda", "record"} and isinstance(node.func, ast.Attribute) and not given:
            yield node.lineno, f".{name}() without a device or a stream"
        named = [each.value for each in node.keywords if each.arg == "device"]
        placed = given[:1] if name == "to" or (name == "device" and len(given) == 1) else named
        if any(_is_bare(inner) for value in placed for inner in _results(value)):
            yield node.lineno, f'{name}("cuda") without an index'


def asks(source: str) -> bool:
    """Return True if the code uses a name of torch that tells whether there are GPUs."""
    for node in _nodes(source):
        if isinstance(node, ast.Attribute) and _dotted(node).removeprefix("torch.") in _ASKS:
            return True
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{each.name}".removeprefix("torch.") for each in node.names}
            if names & _ASKS:
                return True
    return False


def choices(source: str) -> Iterator[int]:
    """Yield the line of each back end for GPUs that is named as a value: an argument, a result, what is assigned."""
    asked: set[int] = set()
    for node in _nodes(source):
        if isinstance(node, ast.Compare | ast.Subscript):
            asked |= {id(inner) for inner in ast.walk(node)}
        elif isinstance(node, ast.Dict):
            asked |= {id(key) for key in node.keys}
    for node in _nodes(source):
        if isinstance(node, ast.Constant) and node.value in _KINDS and id(node) not in asked:
            yield node.lineno


def _dotted(node: ast.expr) -> str:
    """Return a name with its dots; what stands before it is left out unless it is a name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _results(value: ast.expr) -> list[ast.expr]:
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def _is_bare(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == "cuda"


def _path(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def test_no_module_means_a_gpu_without_naming_it() -> None:
    found = [f"{_path(file)}:{line}: {text}" for file in FILES.values() for line, text in mistakes(file.read_text())]
    assert [each for each in found if not each.startswith(MEANS_A_KIND)] == []


def test_nothing_asks_torch_whether_there_are_gpus_but_files_named_here() -> None:
    assert {_path(file) for file in FILES.values() if asks(file.read_text())} == ASKS_FOR_GPUS


def test_nothing_chooses_a_back_end_for_gpus_but_one_file() -> None:
    chosen = {_path(file): [*choices(file.read_text())] for file in FILES.values()}
    assert {path for path, lines in chosen.items() if lines} == {CHOOSES}


@pytest.mark.parametrize(
    "code", ['Backend("nccl")', 'backend = "over_host" if on_gpu else "gloo"', 'def choose():\n    return "nccl"']
)
def test_a_back_end_that_is_chosen_elsewhere_is_found(code: str) -> None:
    assert len([*choices(code)]) == 1
    assert not [*choices('if backend == "nccl": names = {"nccl": "cpu:gloo,cuda:nccl"}["nccl"]')]


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.is_available()",
        "torch.cuda.device_count() > 0",
        "torch.accelerator.is_available()",
        "from torch import cuda\ncuda.is_available()",
        "from torch.cuda import device_count as number",
    ],
)
def test_code_that_asks_torch_for_gpus_is_found(code: str) -> None:
    assert asks(code)
    assert not asks("torch.distributed.is_nccl_available(); torch.backends.mkl.is_available()")


@pytest.mark.parametrize(
    "code",
    [
        'torch.device("cuda")',
        'torch.device("cuda" if gpu else "cpu")',
        'tensor.to("cuda")',
        'torch.empty(3, device="cuda")',
        "model.cuda()",
        "torch.cuda.Stream()",
        "torch.cuda.current_stream()",
        "torch.cuda.synchronize()",
        "torch.cuda.Event().record()",
        "torch.Stream()",
        "torch.accelerator.synchronize()",
    ],
)
def test_a_gpu_without_its_index_is_found(code: str) -> None:
    assert len([*mistakes(code)]) == 1


def test_a_gpu_with_its_index_is_not_found() -> None:
    assert not [*mistakes('torch.device("cuda", 0); torch.cuda.Stream(gpu); event.record(stream); kind == "cuda"')]
