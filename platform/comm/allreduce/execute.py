"""Execution of all-reduce schedules, over a process group or over channels, even on the simulated network."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.allreduce.placement import placed_schedule
from orchestray.platform.comm.allreduce.schedules import Part, Step
from orchestray.platform.comm.channel.base import Channel, Handle
from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.pending import Pending
from orchestray.platform.process.pulse import PULSE


class Scratch:
    """A buffer for received elements that are then added; it is reused by later all-reduces."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, tensor: Tensor, num_elements: int) -> Tensor:
        """Return an uninitialised flat tensor of `num_elements`, with the dtype and device of `tensor`."""
        kind = (tensor.dtype, tensor.device)
        kept = self._kept.get(kind)
        if kept is None or kept.numel() < num_elements:
            kept = self._kept[kind] = tensor.new_empty(num_elements)
        return kept[:num_elements]


def all_reduce(collective: Collective, tensor: Tensor, steps: Sequence[Step], scratch: Scratch | None = None) -> None:
    """Sum `tensor` (contiguous, the same shape on every rank) over all ranks, bit-identical on each, in place.

    Args:
        collective: process group; it counts the bytes sent.
        tensor: has the number of elements that the steps were made for.
        steps: steps of this rank.
        scratch: grows to the largest part that is added: the whole tensor for tree and butterfly, half of it for
            Rabenseifner (the whole if ranks are folded), 1/P of it for the ring.

    Raises:
        PeerLostError: another rank is gone; the content of the tensor is undefined.
    """
    flat = _flat(tensor)
    scratch = scratch or Scratch()
    for step in steps:
        target = _landing(flat, step, scratch)
        send = {} if step.send is None else {step.send.peer: _of(flat, step.send)}
        receive = {} if step.receive is None or target is None else {step.receive.peer: target}
        collective.start_exchange(send, receive).wait()
        _combine(flat, step, target)


def exchanges(
    channels: Mapping[int, Channel], tensor: Tensor, steps: Sequence[Step]
) -> Generator[tuple[Handle[Any], ...], Any, None]:
    """Yield the handles that each round of an all-reduce waits for, for generators that run in virtual time.

    A tensor of the `meta` device costs time on the wire, and nothing is added.
    """
    flat = _flat(tensor)
    scratch = Scratch()
    for step in steps:
        handles: list[Handle[Any]] = []
        if step.send is not None and step.send.num_elements:
            handles.append(channels[step.send.peer].isend(_of(flat, step.send)))
        target = None if flat.is_meta else _landing(flat, step, scratch)
        if step.receive is not None and step.receive.num_elements:
            handles.append(channels[step.receive.peer].irecv(into=target))
        if handles:
            yield tuple(handles)
        _combine(flat, step, target)


class Lane:
    """A queue of jobs that run one after another beside the caller, in the order they were started.

    Its thread lives only while there are jobs, so nothing has to be closed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._runs = False

    def start(self, job: Callable[[], None]) -> Pending:
        """Queue a job and return at once; `wait` returns when the job is done, or raises its exception."""
        future: Future[None] = Future()
        with self._lock:
            self._jobs.append((job, future))
            starts, self._runs = not self._runs, True
        if starts:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return _Awaited(future)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._runs = False
                    return
                job, future = self._jobs.popleft()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                future.set_exception(error)
            else:
                future.set_result(None)


class _Awaited:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        with PULSE.waiting():
            self._future.result()


class Reducer:
    """The scheduled all-reduces of one rank, which run in the background.

    Every rank must start the same ones in the same order.
    """

    def __init__(self, collective: Collective, order: Sequence[int] | None = None) -> None:
        """Prepare all-reduces over a process group.

        Args:
            collective: process group that nothing else uses, because a background thread sends over it.
            order: ranks in the order of their places in the schedules; default: the order of ranks.
        """
        self._collective = collective
        self._order = list(range(collective.size) if order is None else order)
        self._scratch = Scratch()
        self._lane = Lane(f"all-reduce rank {collective.rank}")
        self._plans: dict[tuple[str, int], list[Step]] = {}

    def plan(self, algorithm: str, num_elements: int) -> list[Step]:
        """Return this rank's steps."""
        key = (algorithm, num_elements)
        if key not in self._plans:
            self._plans[key] = placed_schedule(algorithm, self._collective.rank, self._order, num_elements)
        return self._plans[key]

    def start(self, tensor: Tensor, algorithm: str) -> Pending:
        """Start to sum `tensor` in place; do not touch it until `wait` has returned, which may raise PeerLostError."""
        steps = self.plan(algorithm, tensor.numel())
        return self._lane.start(lambda: all_reduce(self._collective, tensor, steps, self._scratch))


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError("all_reduce needs a contiguous tensor: its memory is combined in place.")
    return tensor.detach().view(-1)


def _of(flat: Tensor, part: Part) -> Tensor:
    return flat[part.start : part.stop]


def _landing(flat: Tensor, step: Step, scratch: Scratch) -> Tensor | None:
    """Return the tensor to receive into: the step's own range, or scratch memory if the elements are to be added."""
    if step.receive is None:
        return None
    return scratch.like(flat, step.receive.num_elements) if step.combine == "add" else _of(flat, step.receive)


def _combine(flat: Tensor, step: Step, received: Tensor | None) -> None:
    if step.receive is not None and received is not None and step.combine == "add":
        _of(flat, step.receive).add_(received)
