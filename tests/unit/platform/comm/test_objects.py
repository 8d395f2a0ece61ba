"""Objects and tensors of one member arrive at the others as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.objects import share_tensors
from support.threads import run_replicas
from support.training import log_operations

TENSORS = {
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "flags": torch.tensor([[True, False, True]]),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "transposed": torch.arange(6).view(2, 3).T,
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "large": torch.arange(70_000, dtype=torch.uint8).float(),
    "small": torch.tensor([7], dtype=torch.uint8),
}


def test_tensors_of_any_dtype_shape_and_size_arrive_with_few_messages() -> None:
    calls: list[tuple[str, int]] = []

    def share(world: Collective) -> dict[str, Tensor]:
        if world.rank == 0:
            log_operations(world, calls)
        return share_tensors(world, TENSORS if world.rank == 1 else None, source=1)

    for received in run_replicas(3, share):
        assert list(received) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor), name
    assert len(calls) == 4, "the list and its length, all small ones together, and each large one"


def test_no_tensors_arrive_as_none() -> None:
    assert run_replicas(2, lambda world: share_tensors(world, {} if world.rank == 0 else None, source=0)) == [{}, {}]
