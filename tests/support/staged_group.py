"""Process groups for tensors of a device that gloo does not know: they cross through the memory of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from orchestray.platform.comm.over_host import Copies, OverHost, Returned


class StagedGroup(OverHost):
    """A gloo group for tensors of any device; its copies are not seen, as a GPU's own group waits for nothing."""

    def __init__(self, group: Any) -> None:
        super().__init__(group, lambda tensor: tensor.device.type != "cpu", _Unseen)

    def _host(self, tensors: Sequence[Tensor], *, read: bool) -> tuple[list[Tensor], Copies]:
        with _disable_current_modes():
            return super()._host(tensors, read=read)


class _Unseen(Returned):
    def wait(self, *timeout: Any) -> bool:
        with _disable_current_modes():
            return super().wait(*timeout)
