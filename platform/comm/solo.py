"""A group of one member, for code that works alone as it does among others."""

from __future__ import annotations

from torch import Tensor
from torch._C._distributed_c10d import Store

from orchestray.platform.comm.collective import Collective, Operation
from orchestray.platform.comm.pending import DONE, Pending


class SoloCollective(Collective):
    """A group of one member: every operation is done at once, and nothing is sent."""

    def __init__(self) -> None:
        super().__init__(_Solo())

    def start_all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Pending:
        return DONE

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.clone().unsqueeze(0)

    def start_reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        self._check_parts(part, whole)
        part.view(-1).copy_(whole.view(-1))
        return DONE

    def start_all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        self._check_parts(part, whole)
        whole.view(-1).copy_(part.view(-1))
        return DONE

    def broadcast(self, tensor: Tensor, source: int) -> None:
        return

    def barrier(self) -> None:
        return

    def sibling(self, name: str) -> Collective:
        return self

    def prefix_store(self, name: str) -> Store:
        raise ValueError("a lone member has nobody to meet")


class _Solo:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def abort(self) -> None:
        return
