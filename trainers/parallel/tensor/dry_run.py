"""A trial of a plan in one process, before the workers use it: the group's members are threads.

The threads share the model's tensors and copy everything else. All parts together take the memory of one more model.
The passes are those of `split_model`.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.thread_group import in_threads
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.batch_norm import leave_the_others
from orchestray.trainers.parallel.tensor.apply import split_model

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from orchestray.platform.comm.collective import Operation
    from orchestray.platform.comm.pending import Pending
    from orchestray.trainers.parallel.tensor.base import Plan


def rehearse(model: nn.Module, plan: Plan, size: int, example: Any) -> ConfigError | None:
    """Split copies of the model by a plan over `size` threads, and compare what they compute with the model.

    Args:
        model: the model; not changed.
        plan: plan in the form that `split_model` takes.
        size: number of workers.
        example: inputs of one micro-batch.

    Returns:
        The error of a plan that does not work; None if it works, or if the model cannot be copied.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        parts = [copy.deepcopy(model, dict(shared)) for _ in range(size)]
    except Exception:  # noqa: BLE001 - a user's module may hold anything; the workers check the plan themselves
        return None
    for part in parts:
        leave_the_others(part)
    table = _Table(size)
    precision = _autocast_here()

    def run(rank: int) -> None:
        member = _Member(table, rank)
        try:
            with precision():
                split_model(parts[rank], plan, lambda: member, rank, size, example=example)
            table.meet(rank, "the end", None)
        except BaseException:
            table.leave()
            raise

    try:
        in_threads(size, run)
    except PeerLostError:  # a thread of the rehearsal, not a worker of the gang
        return ConfigError("Split by this plan, the workers do not take part in the same operations.")
    except ConfigError as error:
        return error
    return None


def _autocast_here() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that makes this thread's autocast in another, which has one of its own."""
    kinds = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}

    @contextlib.contextmanager
    def autocast() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in kinds.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))  # as in `split_over_workers`
            yield

    return autocast


class _Table:
    """The shared place where members leave their values and wait for the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._laid: list[tuple[str, Any]] = [("", None)] * size

    def meet(self, rank: int, what: str, value: Any) -> list[Any]:
        """Return what every member has left for the same operation."""
        self._laid[rank] = (what, value)
        self._wait()
        laid = list(self._laid)
        self._wait()  # a member leaves its next value only after all have read this one
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


class _NoProcessGroup:
    """A stand-in for a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = lambda: rank
        self.size = lambda: size


class _Done:
    def wait(self) -> None:
        return


class _Member(Collective):
    """A member's end of a group of threads: every operation is done when it returns."""

    def __init__(self, table: _Table, rank: int) -> None:
        super().__init__(_NoProcessGroup(rank, table.size))
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
