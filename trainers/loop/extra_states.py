"""The extra state of a model's modules around a step: put back after a failed one, and equal on all replicas."""

from __future__ import annotations

import copy
import zlib
from typing import TYPE_CHECKING, Any

from orchestray.platform.comm import objects
from orchestray.platform.run.tensor_file import as_bytes
from orchestray.trainers.core.buffers import with_extra_state
from orchestray.trainers.core.extra_state import decode, encode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from orchestray.platform.comm.collective import Collective


class ExtraStates:
    """The states that `get_extra_state` of a model's modules returns."""

    def __init__(self) -> None:
        self.searched: list[nn.Module] | None = None
        """Modules that were looked in."""
        self.modules: list[nn.Module] = []
        """Modules that have extra state."""
        self._kept: list[Any] = []

    def look_in(self, modules: list[nn.Module]) -> None:
        """Find the modules with extra state."""
        self.searched, self.modules = modules, with_extra_state(modules)

    def keep(self) -> None:
        """Copy the states."""
        self._kept = [copy.deepcopy(module.get_extra_state()) for module in self.modules]

    def put_back(self) -> None:
        """Give the modules the states that were copied."""
        for module, state in zip(self.modules, self._kept, strict=True):
            module.set_extra_state(state)

    def checksum(self, start: int) -> int:
        """Return a checksum of the states, which goes on from another one."""
        for name, tensor in sorted(self._encoded().items()):
            start = zlib.crc32(as_bytes(tensor.detach().to("cpu", copy=True)).data, zlib.crc32(name.encode(), start))
        return start

    def differ(self, replicas: Collective) -> bool:
        """Return True if the replicas have different states. All of them call."""
        return bool(self.modules) and len({*objects.gather_json(replicas, self.checksum(0))}) > 1

    def take_from_first(self, replicas: Collective) -> None:
        """Take the states of the first replica. All of them call."""
        received = objects.share_tensors(replicas, self._encoded() if replicas.rank == 0 else None, 0)
        if replicas.rank != 0:
            states = decode(received)
            for number, module in enumerate(self.modules):
                module.set_extra_state(states[str(number)])

    def _encoded(self) -> dict[str, Tensor]:
        return encode({str(number): module.get_extra_state() for number, module in enumerate(self.modules)})
