"""An accelerator on the CPU: it writes down what is asked of it, and copies as late as events allow.

A copy is done when another stream waits for an event behind it, or the CPU does. So code that forgets to wait reads
what was there before. A copy fails unless its side on the CPU is pinned. A graph is recorded as CUDA's is: it reads and
writes the same memory at each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.data.nested import map_tensors, tensors_in
from orchestray.serving.models.device import Call


class RecordedStream:
    """A stream whose copies are done when they must be."""

    def __init__(self, device: RecordedDevice, name: str) -> None:
        self.name = name
        self.copies: list[Callable[[], Any]] = []
        self.num_done = 0
        self._device = device
        self._doing = threading.Lock()  # several threads of the CPU wait for one stream, and each copy is done once

    def wait_event(self, event: RecordedEvent) -> None:
        self._device.write(f"{self.name} waits for {event.stream.name}")
        event.reach()

    def reach(self, number: int) -> None:
        """Do the copies before this number."""
        with self._doing:
            while self.num_done < number:
                self.copies[self.num_done]()
                self.num_done += 1


class RecordedEvent:
    """A point in a stream."""

    def __init__(self, device: RecordedDevice) -> None:
        self._device = device
        self.stream: RecordedStream
        self._number = 0

    def record(self, stream: RecordedStream) -> None:
        self._device.write(f"{stream.name} records")
        self.stream, self._number = stream, len(stream.copies)

    def synchronize(self) -> None:
        self._device.write(f"CPU waits for {self.stream.name}")
        assert self._device.is_computed.wait(60)
        self.reach()

    def reach(self) -> None:
        self.stream.reach(self._number)


class RecordedDevice:
    """The device. While `is_computed` is not set, nothing that it computes is ready.

    Attributes:
        log: what was asked of it, in order.
        sizes: sizes of the batches of which graphs were recorded.
    """

    device = torch.device("cpu")

    def __init__(self, refuses: Callable[[int], bool] = lambda size: False) -> None:
        self.log: list[str] = []
        self.sizes: list[int] = []
        self.is_computed = threading.Event()
        self.is_computed.set()
        self._refuses = refuses
        self._changed = threading.Condition()
        self._current: list[RecordedStream] = []
        self._pinned: list[Tensor] = []

    def write(self, line: str) -> None:
        with self._changed:
            self.log.append(line)
            self._changed.notify_all()

    def await_log(self, line: str, number: int) -> None:
        """Return when a line has been written `number` times."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.log.count(line) >= number, 60), self.log

    def stream(self, name: str) -> RecordedStream:
        return RecordedStream(self, name)

    def event(self) -> RecordedEvent:
        return RecordedEvent(self)

    @contextmanager
    def on(self, stream: RecordedStream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def memory(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def pinned(self, num_bytes: int) -> Tensor:
        self._pinned.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return self._pinned[-1]

    def copy(self, into: Tensor, source: Tensor) -> None:
        assert self._is_pinned(into) != self._is_pinned(source), "the CPU's side of a copy is pinned, and no other"
        stream = self._current[-1]
        self.write(f"{stream.name} copies")
        stream.copies.append(lambda: into.copy_(source))

    def _is_pinned(self, tensor: Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == place for each in self._pinned)

    def record_graph(self, model: Call, inputs: Any) -> Call:
        size = len(tensors_in(inputs)[0])
        if self._refuses(size):
            raise RuntimeError(f"operation not permitted when stream is capturing {size}\nand more")
        self.sizes.append(size)
        taken = map_tensors(torch.clone, inputs)
        given = model(taken)

        def replay(inputs: Any) -> dict[str, Tensor]:
            self.write(f"replays {size}")
            for place, tensor in zip(tensors_in(taken), tensors_in(inputs), strict=True):
                assert place.shape == tensor.shape
                place.detach().copy_(tensor)
            for name, tensor in model(taken).items():
                given[name].copy_(tensor)
            return given

        return replay
