"""The parameters of a run in one memory that every worker of a node maps, and a record of the updates in progress.

The memory is an anonymous file: it has no name, is passed on as /proc/<process>/fd/<number>, and vanishes with the last
process that has it open or mapped, also after SIGKILL.

Updates take no lock. On the machines that torch supports, an aligned value of 4 or 8 bytes is read and written whole.
An update of it is a read and a later write, and of two at the same moment one is lost. (Recht et al. 2011, "Hogwild!",
section 3, suppose that adding to a value is atomic; torch's kernels add to many at a time, which is not.)

Each worker has marks that only it writes: the number of updates it has begun, and of those it has done. So the number
of updates, the sum over the workers, loses none. What a worker read while others wrote is off by the updates in
progress. Next to the marks is a journal of the updates that a worker has begun. It is written before the first value is
changed: either the share of a lost worker is in the journal, or nothing of it is in the values.
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
from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.ps.protocol.buffers import Buffers

JOURNAL = 128
"""Number of updates of each worker that are remembered; at least one more than the shares it may hold (`MAX_AHEAD`)."""
_LINE_BYTES = 64
"""Bytes of a cache line; the memory that different workers write is this far apart."""
_TOKEN_BYTES = 16
_BEGUN, _DONE, _FENCE, _STEP = range(4)


@dataclass(frozen=True)
class Shape:
    """The layout of the memory; every process derives the same one by itself."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each parameter."""
    dtype: torch.dtype
    num_workers: int
    slots: tuple[str, ...] = ()
    """Names of the optimizer's slots; "step" is a scalar per parameter, of `step_dtype`, the others have the
    parameter's shape.
    """
    step_dtype: torch.dtype = torch.float32
    num_floats: int = 0
    """Number of elements of the model's floating-point buffers."""
    num_integers: int = 0
    """Number of elements of its other buffers."""

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters)

    def regions(self) -> list[tuple[str, torch.dtype, int]]:
        """Return name, dtype and number of elements of each part of the memory, in order."""
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
    """The memory, as mapped by one process.

    Attributes:
        values: the parameters, `[elements]`.
        buffers: the model's buffers.
    """

    def __init__(self, memory_file: int, shape: Shape) -> None:
        """Map an anonymous file, which the caller still owns.

        Args:
            memory_file: file descriptor.
            shape: layout of the memory.
        """
        self.shape = shape
        self._map = mmap.mmap(memory_file, shape.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        parts, start = dict[str, Tensor](), 0
        for name, dtype, count in shape.regions():
            has_any = count > 0  # `frombuffer` refuses an empty tensor
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
        self.steps: np.ndarray = self.marks[:, _STEP]
        """Newest step of which each worker has applied a share."""
        self.journal: np.ndarray = parts["journal"].numpy().reshape(shape.num_workers, JOURNAL, 3)
        self.losses: np.ndarray = parts["losses"].numpy().reshape(shape.num_workers, JOURNAL)
        self.counter = parts["counter"][:1]
        """Count of updates, raised without a lock like a value that each update changes: see `lost_updates`."""

    @classmethod
    def create(cls, shape: Shape) -> SharedValues:
        """Create new memory, of zeros.

        Args:
            shape: layout of the memory.

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
        """Address at which other processes of this machine find the memory, until `close` is called."""
        token = bytes(self._parts["token"].numpy()).hex()
        return json.dumps({"machine": _machine(), "process": os.getpid(), "file": self._file, "token": token})

    @classmethod
    def attach(cls, address: str, shape: Shape) -> SharedValues:
        """Map the memory that another process of this machine has created.

        Args:
            address: its `SharedValues.address`.
            shape: layout of the memory.

        Raises:
            ClusterError: this is another machine, or the other process is not visible from here.
            TrainingError: the memory has another shape.
        """
        location = json.loads(address)
        if location["machine"] != _machine():
            raise ClusterError(
                "strategy.exchange.transport: shared_memory needs all workers and their server on one node, and they "
                "are on several. Ask for fewer workers or less for each, so that one node has room for all, or use "
                "transport: channel."
            )
        try:
            memory_file = os.open(f"/proc/{location['process']}/fd/{location['file']}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ClusterError(
                f"The memory of the parameter server (process {location['process']}) cannot be opened from here: "
                f"{error}. It has ended, or belongs to another user or container; use transport: channel for those."
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
        if bytes(made._parts["token"].numpy()).hex() != location["token"]:
            raise ClusterError(
                f"The parameter server (process {location['process']}) has ended, and another is in its place."
            )
        return made

    def close(self) -> None:
        """Let no more processes attach; those that have attached can continue."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    # -- contents ------------------------------------------------------------------------------------------------------

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a flat tensor, in the parameter's shape."""
        shapes = [shape for _, shape in self.shape.parameters]
        parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def share_state(self, optimizer: Optimizer, names: Sequence[str], *, fill: bool = False) -> None:
        """Have an optimizer keep its state in this memory from now on.

        Args:
            optimizer: optimizer, initialised with parameters of these shapes, in this order.
            names: names with which it was initialised.
            fill: True to write the optimizer's state to the memory, with zeros for what it has not made yet; False to
                give the optimizer the state in the memory.
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

    # -- updates -------------------------------------------------------------------------------------------------------

    def version(self) -> int:
        """Return the number of updates done; while others make theirs, it is off by those in progress."""
        return int(np.add.reduce(self._done))  # the array's own `sum` takes twice as long

    def left_by(self, worker: int) -> list[list[Any]]:
        """Return order, loss, read and write version of the last updates that a lost worker had begun."""
        begun = int(self.marks[worker, _BEGUN])
        # One less than there are places: what is in the last may be of an update that was about to begin.
        places = [number % JOURNAL for number in range(max(0, begun - JOURNAL + 1), begun)]
        return [
            [int(order), float(self.losses[worker, place]), int(read), int(write)]
            for place in places
            for order, read, write in [self.journal[worker, place]]
        ]

    def expel(self, worker: int) -> None:
        """Keep the process that has been this worker until now from beginning more updates."""
        self.marks[worker, _FENCE] += 1

    def run_report(self) -> dict[str, int]:
        """Return the number of `updates` begun by all workers, as this process sees it; empty before the first one."""
        num_updates = int(self.marks[:, _BEGUN].sum())
        return {"updates": num_updates} if num_updates else {}

    def update_counts(self) -> dict[str, int]:
        """Return the number of updates begun, and of those lost on a value that each of them changes."""
        return {"updates": int(self.marks[:, _BEGUN].sum()), "lost_updates": self.lost_updates}

    @property
    def lost_updates(self) -> int:
        """Number of updates begun that `counter` lacks.

        Another update changed the counter at the same moment, or the worker was killed before it. A value that all
        updates change loses about as many updates; a value that few change, fewer.
        """
        return int(self.marks[:, _BEGUN].sum()) - int(self.counter)


class Marks:
    """The marks of one worker, which only it writes."""

    def __init__(self, shared: SharedValues, worker: int) -> None:
        """Continue after an earlier process of this worker, whose update may have ended half-way.

        Args:
            shared: memory of the run.
            worker: number of the worker.
        """
        self._row, self._journal, self._losses = shared.marks[worker], shared.journal[worker], shared.losses[worker]
        self._counter, self._steps = shared.counter, shared.steps
        self._number = int(self._row[_BEGUN])
        self._row[_DONE] = self._number
        self._fence = int(self._row[_FENCE])

    @property
    def is_expelled(self) -> bool:
        """True if the worker was given up; what it holds is then handed out again."""
        return int(self._row[_FENCE]) != self._fence

    def reach(self, step: int) -> int:
        """Record the step of a share that is about to be applied; return the newest step of any worker.

        A worker that was held up applies shares of early steps, whose learning rates belong to the past.
        """
        self._row[_STEP] = max(step, self._row[_STEP])
        return int(np.maximum.reduce(self._steps))

    def begin(self, order_id: int, loss_sum: float, read_version: int, write_version: int) -> None:
        """Record that an update begins. The share counts as done from here on, and is not computed again if this worker
        dies.

        Args:
            order_id: id of the share's order.
            loss_sum: the share's part of the batch's mean loss.
            read_version: number of updates in the parameters that the gradient was computed from.
            write_version: number of updates in the parameters when it is applied.
        """
        place = self._number % JOURNAL
        self._journal[place] = order_id, read_version, write_version
        self._losses[place] = loss_sum
        self._number += 1
        self._row[_BEGUN] = self._number

    def end(self) -> None:
        """Record that the update is made."""
        self._counter.add_(1)
        self._row[_DONE] = self._number


def _padded(dtype: torch.dtype, count: int) -> int:
    return -(-dtype.itemsize * count // _LINE_BYTES) * _LINE_BYTES


def _none(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype)


def _machine() -> str:
    """Return an id that differs between machines that are up at the same time."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
