"""Process groups for tensors of a device that gloo does not know: they cross through the memory of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class StagedGroup:
    """A gloo group that takes tensors of any device, and copies them to the host and back."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[Tensor], *options: Any) -> Any:
        return self._in_place(tensors, lambda own: self._group.allreduce(own, *options))

    def broadcast(self, tensor: Tensor, source: int) -> Any:
        return self._in_place([tensor], lambda own: self._group.broadcast(own[0], source))

    def allgather(self, rows: list[list[Tensor]], own: list[Tensor]) -> Any:
        return self._staged(own, rows[0], lambda sent, into: self._group.allgather([into], sent))

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor) -> Any:
        return self._staged([whole], [part], lambda of, into: self._group._reduce_scatter_base(into[0], of[0]))

    def _allgather_base(self, whole: Tensor, part: Tensor) -> Any:
        return self._staged([part], [whole], lambda of, into: self._group._allgather_base(into[0], of[0]))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._staged(tensors, [], lambda own, _: self._group.send(own, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._staged([], tensors, lambda _, into: self._group.recv(into, peer, tag))

    def _in_place(self, tensors: Sequence[Tensor], launch: Callable[[list[Tensor]], Any]) -> Any:
        return self._staged(tensors, tensors, lambda own, _: launch(own))

    def _staged(
        self, sent: Sequence[Tensor], filled: Sequence[Tensor], launch: Callable[[list[Tensor], list[Tensor]], Any]
    ) -> Any:
        if all(tensor.device.type == "cpu" for tensor in (*sent, *filled)):
            return launch([*sent], [*filled])
        with torch.utils._python_dispatch._disable_current_modes():  # a GPU's own group waits for nothing here
            own = [tensor.detach().cpu() for tensor in sent]
            into = own if sent is filled else [torch.empty_like(tensor, device="cpu") for tensor in filled]
            return _Staged(launch(own, into), into, filled)


class _Staged:
    def __init__(self, work: Any, host: list[Tensor], filled: Sequence[Tensor]) -> None:
        self._work, self._host, self._filled = work, host, filled

    def wait(self, *timeout: Any) -> None:
        self._work.wait(*timeout)
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            for tensor, host in zip(self._filled, self._host, strict=True):
                tensor.copy_(host)
