"""A process group for members that share a GPU: their tensors travel over pinned host memory, by gloo.

NCCL refuses two ranks on one GPU, and gloo has no send, receive, reduce-scatter and flat all-gather for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Copies = list[tuple[Tensor, Tensor]]
"""Pairs of a tensor and its copy on the host."""


class OverHost:
    """A gloo group whose operations also take tensors on GPUs; tensors on CPUs are used in place.

    Args:
        group: the gloo group, or a `ProcessGroup` around one.
        is_far: returns True for a tensor that must be copied to the host.
    """

    supports_coalescing = False

    def __init__(self, group: Any, is_far: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
        self.inner = group
        self._is_far = is_far

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def allreduce(self, tensors: Sequence[Tensor], operation: Any) -> Any:
        (tensor,) = tensors
        host, copies = self._host([tensor], read=True)
        return _Returned(self.inner.allreduce(host, operation), copies)

    def allgather(self, rows: Sequence[Sequence[Tensor]], own: Sequence[Tensor]) -> Any:
        into, copies = self._host(rows[0], read=False)
        return _Returned(self.inner.allgather([into], self._host(own, read=True)[0]), copies)

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor) -> Any:
        (into,), copies = self._host([part], read=False)
        return _Returned(self.inner._reduce_scatter_base(into, self._host([whole], read=True)[0][0]), copies)

    def _allgather_base(self, whole: Tensor, part: Tensor) -> Any:
        (into,), copies = self._host([whole], read=False)
        return _Returned(self.inner._allgather_base(into, self._host([part], read=True)[0][0]), copies)

    def broadcast(self, raw: Tensor, source: int) -> Any:
        (host,), copies = self._host([raw], read=self.inner.rank() == source)
        return _Returned(self.inner.broadcast(host, source), copies)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        host, _ = self._host(tensors, read=True)
        return _Returned(self.inner.send(host, peer, tag), [], host)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        host, copies = self._host(tensors, read=False)
        return _Returned(self.inner.recv(host, peer, tag), copies)

    def _host(self, tensors: Sequence[Tensor], *, read: bool) -> tuple[list[Tensor], Copies]:
        """Return tensors of the host for these, and the pairs to copy back; with their contents if they are read."""
        host, copies = [], []
        for tensor in tensors:
            if not self._is_far(tensor):
                host.append(tensor)
                continue
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            if read:
                copy.copy_(tensor, non_blocking=True)
            host.append(copy)
            copies.append((tensor, copy))
        for device in {tensor.device for tensor, _ in copies if read and tensor.is_cuda}:
            stream = torch.cuda.current_stream(device)
            stream.synchronize()  # gloo reads the copies at once
        return host, copies


class _Returned:
    """The handle of an operation; its `wait` copies results back to where they belong."""

    def __init__(self, work: Any, copies: Copies, kept: Sequence[Tensor] = ()) -> None:
        self._work, self._copies, self._kept = work, copies, kept

    def wait(self, *timeout: Any) -> bool:
        self._work.wait(*timeout)
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy, non_blocking=True)
        self._copies, self._kept = [], ()
        return True
