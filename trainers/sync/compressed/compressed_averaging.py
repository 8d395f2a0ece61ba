"""Local SGD whose replicas send, compressed, what they have moved since they last met.

After Basu et al., "Qsparse-local-SGD" (2019), algorithm 1: with error feedback, what a compressor drops of one move is
added to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, ring_bytes
from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.registry import make_compressor
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.compressed.compressed_sum import CodedSum, coded_sum
from orchestray.trainers.sync.local.averaging import Averaging


class CompressedAveraging(Averaging):
    """An `Averaging` with compressed moves; means for a validation, and the last one at the end, are not compressed.

    Args:
        compression: the config's `strategy.compression` section, of any type but `none`, `dgc` and `powersgd`.
        every: steps between two meetings.
        outer_optimizer: optimizer of the mean's move (see `Averaging`).
        unit: what `every` counts.
        seed: seed of the run, for random rounding.
    """

    def __init__(
        self,
        compression: Mapping[str, Any],
        every: int | Literal["end"] = 1,
        outer_optimizer: Mapping[str, Any] | None = None,
        unit: Literal["steps", "samples"] = "steps",
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(every, outer_optimizer, unit)
        self._compression = dict(compression)
        self._seed = seed
        self._base: list[Tensor] = []
        """Parameters that all replicas had when they met last, the same bits on each."""
        self._moving: list[Tensor] = []
        """Parameters of this replica: the shared tensors without statistics, of which plain means are taken."""
        self._coded: CodedSum | None = None

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        self._base = []
        self._moving = [tensor for index, tensor in enumerate(self._shared) if index not in self._statistics]

        def make(number: int) -> Compressor:
            seed = self._seed + 1_000_003 * number
            return make_compressor(**self._compression, seed=seed, worker=collective.rank, num_workers=collective.size)

        self._coded = coded_sum(make, self._moving, collective) if collective.size > 1 else None

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self._step = step
        self._remember()

    def average(self) -> None:
        if self._coded is None:
            return
        self._remember()
        sent_before = self.joined().own_bytes_sent
        sums = self._coded.all_reduce(torch._foreach_sub(self._moving, self._base), self._step)
        for base, total in zip(self._base, sums, strict=True):
            base.add_(total / self.joined().size)
        torch._foreach_copy_(self._moving, self._base)
        dense = sum(ring_bytes(tensor, self.joined().size) for tensor in self._moving)
        self.bytes_saved += dense - (self.joined().own_bytes_sent - sent_before)
        self.take_mean([self._shared[index] for index in self._statistics])

    def meet(self) -> None:
        super().meet()
        with torch.no_grad():
            torch._foreach_copy_(self._base, self._moving)  # an outer optimizer may have gone further

    def state(self) -> dict[str, LocalTensor]:
        kept = super().state()
        if self._coded is not None:
            kept |= {
                f"base.{name}": LocalTensor(base, self._own[name].piece) for name, base in self._by_name(self._base)
            }
            for kind, tensors in self._coded.kept().items():
                kept |= {f"{kind}.{name}": self._held_of(name, tensor) for name, tensor in self._by_name(tensors)}
        return kept

    def wanted(self) -> dict[str, TensorSlice]:
        return {name: held.piece for name, held in self.state().items()} | super().wanted()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state(tensors)
        if self._coded is None:
            return
        for name, base in self._by_name(self._base):
            base.copy_(tensors[f"base.{name}"])
        names = [name for name, _ in self._by_name(self._base)]
        kinds = self._coded.kept()
        self._coded.keep({kind: [tensors.get(f"{kind}.{name}") for name in names] for kind in kinds})

    def _remember(self) -> None:
        if not self._base:  # not when attached: a checkpoint may have been loaded since
            self._base = [tensor.clone() for tensor in self._moving]

    def _by_name(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        self._remember()
        shared = [name for name, held in self._own.items() if held.tensor.is_floating_point()]
        names = [name for index, name in enumerate(shared) if index not in self._statistics]
        return list(zip(names, tensors or self._base, strict=True))

    def _held_of(self, name: str, tensor: Tensor) -> LocalTensor:
        piece = self._own[name].piece
        return LocalTensor(
            tensor, piece if tensor.shape == self._own[name].tensor.shape else TensorSlice.whole(name, tensor.shape)
        )
