"""Parameters in one memory that every worker of a node maps, and what must be known of who is changing them.

The memory is an anonymous file: it has no name, is passed on as /proc/<process>/fd/<number>, and vanishes with the last
process that has it open or mapped, also after SIGKILL.

Nobody locks. On the machines torch runs on a value of 4 or 8 bytes that lies at a multiple of its size is read and
written whole. An update of it is a read and a later write, and of two at the same moment one is lost. (Recht et al.
2011, "Hogwild!", section 3, suppose that adding to a value is atomic; torch's kernels add to many at a time, which is
not.)

Each worker has marks that only it writes: how many updates it has begun, and how many it has done. So the number of
updates, the sum over the workers, loses none, and what a worker read while others wrote is off by those under way. A
journal of the updates a worker has begun is beside them. It is written before the first value is changed: a share whose
worker was lost is in the journal, or nothing of it is in the values.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestray.platform.errors import ClusterError, TrainingError
from orchestray.trainers.central.buffers import Buffers
from orchestray.trainers.optimizers import Optimizer

JOURNAL = 128
"""Updates of each worker that are remembered; more than it may hold shares (`MAX_AHEAD`), by one at least."""
_LINE_BYTES = 64
"""Of a cache: what different workers write lies this far apart."""
_TOKEN_BYTES = 16
_BEGUN, _DONE, _FENCE = range(3)


@dataclass(frozen=True)
class Shape:
    """What the memory holds; the same on every process, which each finds out by itself."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each."""
    dtype: torch.dtype
    num_workers: int
    slots: tuple[str, ...] = ()
    """The optimizer's; "step" is a scalar a parameter, of `step_dtype`, the others are shaped as the parameter is."""
    step_dtype: torch.dtype = torch.float32
    num_floats: int = 0
    """Elements of the model's floating-point buffers."""
    num_integers: int = 0
    """Elements of its other buffers."""

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters)

    def regions(self) -> list[tuple[str, torch.dtype, int]]:
        """Name, dtype and number of elements of each part of the memory, in order."""
        line, workers = _LINE_BYTES // 8, self.num_workers
        slots = [
            (slot, self.step_dtype, len(self.parameters)) if slot == "step" else (slot, self.dtype, self.num_elements)
            for slot in self.slots
        ]
        return [
            ("token", torch.uint8, _TOKEN_BYTES),
            ("marks", torch.int64, workers * line),
            ("journal", torch.int64, workers * JOURNAL * 3),
            ("losses", torch.float64, workers * JOURNAL),
            ("counter", torch.int64, line),
            ("floats", torch.float64, self.num_floats),
            ("integers", torch.int64, self.num_integers),
            *((f"slot/{name}", dtype, count) for name, dtype, count in slots),
            ("values", self.dtype, self.num_elements),
        ]

    @property
    def num_bytes(self) -> int:
        return sum(_padded(dtype, count) for _, dtype, count in self.regions())


class SharedValues:
    """The memory, as one process sees it.

    Attributes:
        values: the parameters, `[elements]`.
        buffers: the model's buffers.
    """

    def __init__(self, memory_file: int, shape: Shape) -> None:
        """Map an anonymous file, which stays the caller's."""
        self.shape = shape
        self._map = mmap.mmap(memory_file, shape.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        parts, start = dict[str, Tensor](), 0
        for name, dtype, count in shape.regions():
            has_any = count > 0  # torch makes no tensor of nothing
            parts[name] = (
                torch.frombuffer(self._map, dtype=dtype, count=count, offset=start) if has_any else _none(dtype)
            )
            start += _padded(dtype, count)
        self._parts = parts
        self._file: int | None = None
        self.values = parts["values"]
        self.buffers = Buffers(parts["floats"], parts["integers"])
        self.marks: np.ndarray = parts["marks"].numpy().reshape(shape.num_workers, -1)
        self._done = self.marks[:, _DONE]
        self.journal: np.ndarray = parts["journal"].numpy().reshape(shape.num_workers, JOURNAL, 3)
        self.losses: np.ndarray = parts["losses"].numpy().reshape(shape.num_workers, JOURNAL)
        self.counter = parts["counter"][:1]
        """One more for each update, without a lock, as a value that each of them changes: see `lost_updates`."""

    @classmethod
    def create(cls, shape: Shape) -> SharedValues:
        """New memory, of zeros.

        Raises:
            ClusterError: this is not Linux.
        """
        if sys.platform != "linux":
            raise ClusterError("transport: shared_memory needs Linux; use transport: channel.")
        memory_file = os.memfd_create("orchestray-values")
        try:
            os.ftruncate(memory_file, shape.num_bytes)
            made = cls(memory_file, shape)
        except BaseException:
            os.close(memory_file)
            raise
        made._file = memory_file
        made._parts["token"].copy_(torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8))
        return made

    @property
    def address(self) -> str:
        """Where other processes of this machine find it, as long as `close` was not called."""
        token = bytes(self._parts["token"].numpy()).hex()
        return json.dumps({"machine": _machine(), "process": os.getpid(), "file": self._file, "token": token})

    @classmethod
    def attach(cls, address: str, shape: Shape) -> SharedValues:
        """The memory that another process of this machine has created.

        Raises:
            ClusterError: this is another machine, or the other process cannot be seen from here.
            TrainingError: it is of another shape.
        """
        told = json.loads(address)
        if told["machine"] != _machine():
            raise ClusterError(
                "strategy.exchange.transport: shared_memory needs all workers and their server on one node, and they "
                "are on several. Ask for fewer workers or less for each, so that one node has room for all, or use "
                "transport: channel."
            )
        try:
            memory_file = os.open(f"/proc/{told['process']}/fd/{told['file']}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ClusterError(
                f"The memory of the parameter server (process {told['process']}) cannot be opened from here: {error}. "
                "It has ended, or belongs to another user or container; use transport: channel for those."
            ) from error
        try:
            if (found := os.fstat(memory_file).st_size) != shape.num_bytes:
                raise TrainingError(
                    f"The parameter server shares {found} bytes and this worker's model needs {shape.num_bytes}: the "
                    "task builds another model here than there. build_model() must depend on its arguments alone."
                )
            made = cls(memory_file, shape)
        finally:
            os.close(memory_file)
        if bytes(made._parts["token"].numpy()).hex() != told["token"]:
            raise ClusterError(
                f"The parameter server (process {told['process']}) has ended, and another is in its place."
            )
        return made

    def close(self) -> None:
        """No more processes may attach; those that have go on."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    # -- what it holds -------------------------------------------------------------------------------------------------

    def views(self, flat: Tensor) -> list[Tensor]:
        """Of each parameter its part of a flat tensor, in the parameter's shape."""
        shapes = [shape for _, shape in self.shape.parameters]
        parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def share_state(self, optimizer: Optimizer, names: Sequence[str], *, fill: bool = False) -> None:
        """Have an optimizer keep its state here from now on.

        Args:
            optimizer: initialised with parameters of these shapes, in this order.
            names: what it was told they are called.
            fill: make what is here what the optimizer has, zeros for what it has not made yet; else the optimizer's
                state becomes what is here.
        """
        here: dict[str, Tensor] = {}
        for slot in self.shape.slots:
            region = self._parts[f"slot/{slot}"]
            views = list(region.unbind()) if slot == "step" else self.views(region)
            here |= {f"{name}.{slot}": view for name, view in zip(names, views, strict=True)}
        if fill:
            for key, tensor in optimizer.state_tensors().items():
                here[key].copy_(tensor)
        optimizer.load_state_tensors(here)
        for key, tensor in optimizer.state_tensors().items():
            tensor.set_(here[key])  # type: ignore[call-overload]  # the same tensor, in other memory

    # -- who changes it ------------------------------------------------------------------------------------------------

    def version(self) -> int:
        """Updates that are done; while others make theirs, off by those under way."""
        return int(np.add.reduce(self._done))  # the array's own `sum` takes twice as long

    def left_by(self, worker: int) -> list[list[Any]]:
        """Order, loss, read and write version of the last updates that a worker has begun, which is no longer there."""
        begun = int(self.marks[worker, _BEGUN])
        # One less than there are places: what is in the last may be of an update that was about to begin.
        places = [number % JOURNAL for number in range(max(0, begun - JOURNAL + 1), begun)]
        return [
            [int(order), float(self.losses[worker, place]), int(read), int(write)]
            for place in places
            for order, read, write in [self.journal[worker, place]]
        ]

    def expel(self, worker: int) -> None:
        """Whoever has been this worker until now begins no more updates."""
        self.marks[worker, _FENCE] += 1

    def told(self) -> dict[str, int]:
        """Updates begun, and how many of them were lost on a value that each of them changes."""
        return {"updates": int(self.marks[:, _BEGUN].sum()), "lost_updates": self.lost_updates}

    @property
    def lost_updates(self) -> int:
        """Of the updates begun, those that `counter` lacks: it was changed by another at that moment, or its worker was
        killed before. A value that all updates change loses about as many; one that few change, fewer.
        """
        return int(self.marks[:, _BEGUN].sum()) - int(self.counter)


class Marks:
    """One worker's marks, written by it alone."""

    def __init__(self, shared: SharedValues, worker: int) -> None:
        """Go on after an earlier process that was this worker, whose update may have ended half-way."""
        self._row, self._journal, self._losses = shared.marks[worker], shared.journal[worker], shared.losses[worker]
        self._counter = shared.counter
        self._number = int(self._row[_BEGUN])
        self._row[_DONE] = self._number
        self._fence = int(self._row[_FENCE])

    @property
    def is_expelled(self) -> bool:
        """Whether the worker was given up: what it holds is handed out again."""
        return int(self._row[_FENCE]) != self._fence

    def begin(self, order_id: int, loss_sum: float, read_version: int, write_version: int) -> None:
        """The share counts as done from here on: nobody computes it again, whatever becomes of this worker."""
        place = self._number % JOURNAL
        self._journal[place] = order_id, read_version, write_version
        self._losses[place] = loss_sum
        self._number += 1
        self._row[_BEGUN] = self._number

    def end(self) -> None:
        """The update is made."""
        self._counter.add_(1)
        self._row[_DONE] = self._number


def _padded(dtype: torch.dtype, count: int) -> int:
    return -(-dtype.itemsize * count // _LINE_BYTES) * _LINE_BYTES


def _none(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype)


def _machine() -> str:
    """Tells machines apart that are up at the same time."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
