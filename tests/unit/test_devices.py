"""The product names a GPU by its index, and asks in one place whether there are any."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.layers import FILES, ROOT

POLICY = "platform/comm/backend.py"
"""The one module that may ask torch for GPUs: what a worker may use is what it was given, not what is visible."""
ASKS_FOR_GPUS = {
    POLICY,
    "trainers/survey/lab/connecting.py",  # reports what this machine has
}
"""Files that call `torch.cuda.is_available`. None may be added."""
MEANS_A_KIND = "platform/comm/process_groups.py"
"""Registers the back end of all GPUs: the device there is a kind."""
_WITHOUT_DEVICE = {"is_available", "is_initialized", "device_count", "current_device", "Event", "CUDAGraph"} | {
    "get_rng_state_all",
    "graph_pool_handle",
    "empty_cache",
}
"""Functions of `torch.cuda` that take no device, or return one."""


def mistakes(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each place at which the thread's current GPU is meant without being named."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        called = ast.unparse(node.func)
        if called.startswith("torch.cuda."):
            if not given and called.removeprefix("torch.cuda.") not in _WITHOUT_DEVICE:
                yield node.lineno, f"{called}() without a device"
            continue
        name = called.rpartition(".")[2]
        if name in {"cuda", "record"} and isinstance(node.func, ast.Attribute) and not given:
            yield node.lineno, f".{name}() without a device or a stream"
        named = [each.value for each in node.keywords if each.arg == "device"]
        placed = given[:1] if name == "to" or (name == "device" and len(given) == 1) else named
        if any(_is_bare(inner) for value in placed for inner in _results(value)):
            yield node.lineno, f'{name}("cuda") without an index'


def _results(value: ast.expr) -> list[ast.expr]:
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def _is_bare(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == "cuda"


def _path(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def test_no_module_means_a_gpu_without_naming_it() -> None:
    found = [f"{_path(file)}:{line}: {text}" for file in FILES.values() for line, text in mistakes(file.read_text())]
    assert [each for each in found if not each.startswith(MEANS_A_KIND)] == []


def test_nothing_asks_torch_whether_there_are_gpus_but_the_policy() -> None:
    asking = {_path(file) for file in FILES.values() if "cuda.is_available" in file.read_text()}
    assert asking <= ASKS_FOR_GPUS


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
    ],
)
def test_a_gpu_without_its_index_is_found(code: str) -> None:
    assert len([*mistakes(code)]) == 1


def test_a_gpu_with_its_index_is_not_found() -> None:
    assert not [*mistakes('torch.device("cuda", 0); torch.cuda.Stream(gpu); event.record(stream); kind == "cuda"')]
