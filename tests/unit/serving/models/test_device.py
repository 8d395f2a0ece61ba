"""The share of a GPU that a process may use, and the memory of its graphs."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.serving.models.device import CudaAccelerator, chosen_device, limit_memory, release_memory


@pytest.mark.parametrize(("num_gpus", "share"), [(0, None), (0.25, 0.25), (1, None), (2, None)])
def test_a_fraction_of_a_gpu_is_a_share_of_its_memory_and_whole_gpus_have_no_bound(
    monkeypatch: pytest.MonkeyPatch, num_gpus: float, share: float | None
) -> None:
    bounds: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: bounds.append(given))
    limit_memory(num_gpus)
    assert bounds == ([] if share is None else [(share, torch.device("cuda", 0))])
    assert chosen_device(num_gpus) == (torch.device("cuda", 0) if num_gpus else torch.device("cpu"))


class Cyclic:
    """A model that only the garbage collector frees."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("touched", [False, True])
def test_memory_of_garbage_goes_back_to_the_gpu_and_one_that_nobody_has_used_stays_so(
    monkeypatch: pytest.MonkeyPatch, *, touched: bool
) -> None:
    model: Any = weakref.ref(Cyclic())
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: touched)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(model() is None))
    gc.disable()
    try:
        release_memory()
    finally:
        gc.enable()
    assert model() is None
    assert freed == [True] * touched, "the model goes first: what it holds cannot be given back"


@pytest.mark.parametrize("takes_gradients", [False, True])
def test_each_replay_of_a_graph_reads_the_inputs_of_its_own_batch(
    monkeypatch: pytest.MonkeyPatch, takes_gradients: bool
) -> None:
    given: list[Tensor] = []
    replayed: list[Tensor] = []

    class Graph:
        def replay(self) -> None:
            replayed.append(given[-1].detach().clone())

    @contextlib.contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        yield

    def model(inputs: Tensor) -> dict[str, Tensor]:
        given.append(inputs.requires_grad_(takes_gradients))
        return {"outputs": inputs + 1}

    stand_ins = {"CUDAGraph": Graph, "graph": graph, "current_stream": id, "graph_pool_handle": object}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    replay = CudaAccelerator(torch.device("cuda", 0)).record_graph(model, torch.zeros(2))
    assert all(each is given[0] for each in given), "a graph reads the same memory"
    for number in (1.0, 2.0):
        replay(torch.full((2,), number))
    assert [each.tolist() for each in replayed] == [[1.0, 1.0], [2.0, 2.0]]
