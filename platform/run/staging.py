"""Staging memory for a checkpoint's tensors, in the layout of the file they are written to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.run.tensor_file import TensorLayout, as_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy as np
    import torch

# Tensors up to this size are copied before the training loop continues: that is cheaper than waiting for them.
SMALL_BYTES = 64 * 1024


class Staging:
    """One file's buffer, reused for every checkpoint; pinned if tensors come from a GPU."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        import numpy as np
        import torch

        self._signature = _signature(tensors)
        self.layout = TensorLayout.of(tensors)
        self._is_on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        # Nothing is touched here: pages are faulted in by `prefault`, or by the first copy.
        self.values: np.ndarray[Any, Any] = (
            torch.empty(self.layout.num_value_bytes, dtype=torch.uint8, pin_memory=True).numpy()
            if self._is_on_gpu
            else np.empty(self.layout.num_value_bytes, dtype=np.uint8)
        )

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return True if `tensors` have the names, shapes, dtypes and devices that this buffer was made for."""
        return self._signature == _signature(tensors)

    def prefault(self) -> None:
        """Touch every page, so that the first copy is as fast as the later ones."""
        self.values.fill(0)

    def early_names(self, tensors: Mapping[str, torch.Tensor], changing: Collection[str]) -> list[str]:
        """Return the tensors to copy before training continues: those that the forward pass changes, and small ones."""
        slots = self.layout.slots
        return [name for name in tensors if name in changing or slots[name].stop - slots[name].start <= SMALL_BYTES]

    def copy(self, tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
        """Copy the named tensors to their slots: those on the CPU at once, those on a GPU on its current stream."""
        import numpy as np
        import torch

        # NumPy copies with one thread and without the GIL; torch's copy would start a second team of OpenMP threads.
        on_cpu = [name for name in names if tensors[name].device.type == "cpu"]
        for name in on_cpu:
            slot = self.layout.slots[name]
            np.copyto(self.values[slot.start : slot.stop], as_bytes(tensors[name]))
        if len(on_cpu) < len(names):
            pinned = torch.from_numpy(self.values)
            for name in set(names).difference(on_cpu):
                slot = self.layout.slots[name]
                flat = tensors[name].detach().reshape(-1).view(torch.uint8)
                pinned[slot.start : slot.stop].copy_(flat, non_blocking=tensors[name].is_cuda)


def _signature(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, Any, Any, Any]]:
    return [(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()]
