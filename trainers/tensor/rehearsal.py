"""Trying a plan in one process, before any worker is bound to it: the group's members are threads.

The threads share the model's tensors and copy what else it is made of, so that all parts together take the memory of
one more model. What is run are the passes of `split_model`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.collective import Collective, PeerLostError
from orchestray.platform.errors import ConfigError
from orchestray.trainers.tensor.apply import split_model

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from orchestray.platform.collective import Operation, Pending
    from orchestray.trainers.tensor.base import Plan


def rehearse(model: nn.Module, plan: Plan, size: int, example: Any) -> ConfigError | None:
    """Split copies of the model by a plan over `size` threads and hold what they compute against it.

    Args:
        model: stays as it is.
        plan: as `split_model` takes it.
        size: workers.
        example: inputs of one micro-batch.

    Returns:
        Why the plan does not do; None if it does, or if the model cannot be copied.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        parts = [copy.deepcopy(model, dict(shared)) for _ in range(size)]
    except Exception:  # noqa: BLE001 - whatever a user's module holds; the workers hold the plan against it themselves
        return None
    table = _Table(size)
    errors: list[Exception] = []

    def run(rank: int) -> None:
        member = _Member(table, rank)
        try:
            split_model(parts[rank], plan, lambda: member, rank, size, example=example)
            table.meet(rank, "the end", None)
        except Exception as error:  # noqa: BLE001 - carried to the caller's thread
            errors.append(error)
            table.leave()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rehearsal-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not errors:
        return None
    error = min(errors, key=lambda found: isinstance(found, PeerLostError))
    if isinstance(error, PeerLostError):  # no peer of the gang's
        return ConfigError("Split by this plan, the workers do not take part in the same operations.")
    if isinstance(error, ConfigError):
        return error
    raise error


class _Table:
    """Where the members lay down what they have, and wait for the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._laid: list[tuple[str, Any]] = [("", None)] * size

    def meet(self, rank: int, what: str, value: Any) -> list[Any]:
        """What every member has laid down for the same operation."""
        self._laid[rank] = (what, value)
        self._wait()
        laid = list(self._laid)
        self._wait()  # nobody lays down anew before all have looked
        if any(other != what for other, _ in laid):
            raise PeerLostError("The members of a rehearsal do different things.")
        return [value for _, value in laid]

    def leave(self) -> None:
        self._barrier.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise PeerLostError("A member of the rehearsal has left.") from error


class _Nobody:
    """In the place of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = lambda: rank
        self.size = lambda: size


class _Done:
    def wait(self) -> None:
        return


class _Member(Collective):
    """A member's end of a group of threads: every operation is done when it returns."""

    def __init__(self, table: _Table, rank: int) -> None:
        super().__init__(_Nobody(rank, table.size))
        self._table = table

    def start_all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Pending:
        rows = torch.stack(self._meet(operation, tensor.clone()))
        tensor.copy_(rows.sum(0) if operation == "sum" else rows.amax(0))
        return _Done()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._meet("gather", tensor.clone()))

    def start_reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        self._check_parts(part, whole)
        total = torch.stack(self._meet("reduce-scatter", whole.clone())).sum(0)
        part.view(-1).copy_(total.view(self.size, -1)[self.rank])
        return _Done()

    def start_all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        self._check_parts(part, whole)
        whole.view(self.size, -1).copy_(torch.stack(self._meet("all-gather", part.clone())).view(self.size, -1))
        return _Done()

    def start_exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> Pending:
        sent = self._meet("exchange", {peer: tensor.clone() for peer, tensor in send.items()})
        for peer, tensor in receive.items():
            tensor.copy_(sent[peer][self.rank].view(tensor.shape))
        return _Done()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._meet("broadcast", tensor.clone())[source])

    def barrier(self) -> None:
        self._meet("barrier", None)

    def sibling(self, name: str) -> Collective:
        return self

    def subgroup(self, name: str, ranks: Sequence[int]) -> Collective:
        if list(ranks) == list(range(self.size)):
            return self
        raise ValueError("a rehearsal has one group")

    def prefix_store(self, name: str) -> Store:
        raise ValueError("the members of a rehearsal are threads")

    def abort(self) -> None:
        self._table.leave()

    def _meet(self, what: str, value: Any) -> list[Any]:
        return self._table.meet(self.rank, what, value)
