"""All-reduce of compressed gradients: each step's sum is compressed, and its error is kept for the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.registry import make_compressor
from orchestray.trainers.sync.common.combined_gradients import CombinedGradients, units_of
from orchestray.trainers.sync.compressed.compressed_sum import CodedSum, MergedSum, coded_sum


class Compressed(CombinedGradients):
    """The sum of the replicas' gradients, each compressed.

    With error feedback the following holds at every step. The sum of what all steps gave the optimizers and of all
    replicas' residuals (`state`) is the sum of all gradients.

    Args:
        compression: the config's `strategy.compression` section, of any type but `none` and `powersgd`.
        seed: seed of the run, for random rounding.
        is_nested: True to sum a few values over a nested butterfly.
    """

    def __init__(self, compression: Mapping[str, Any], *, seed: int = 0, is_nested: bool = False) -> None:
        super().__init__()
        self._is_nested = is_nested
        self._compression = dict(compression)
        self._seed = seed
        self._units: list[list[int]] = []
        self._coded: list[CodedSum] = []

    def prepare(self, model: nn.Module) -> None:
        collective = self.joined()

        def make(number: int) -> Compressor:
            # Every chunk draws its own numbers; all workers of a tensor group draw the same, see `units_of`.
            seed = self._seed + 1_000_003 * number
            return make_compressor(**self._compression, seed=seed, worker=collective.rank, num_workers=collective.size)

        self._units = units_of(self._updates)
        self._coded = []
        for unit in self._units:
            tensors = [self._parameters[index].detach() for index in unit]
            self._coded.append(coded_sum(make, tensors, collective, is_nested=self._is_nested))
        self.remembers = any(coded.kept() for coded in self._coded)

    def detach(self) -> None:
        super().detach()
        self._units, self._coded = [], []
        self.remembers = False

    def combine(self, gradients: list[Tensor], flags: list[bool]) -> list[Tensor]:
        combined = list(gradients)
        for unit, coded in zip(self._units, self._coded, strict=True):
            sums = coded.all_reduce([gradients[index] for index in unit], self._step)
            for index, total in zip(unit, sums, strict=True):
                combined[index] = total
        self.step_metrics = self._measured()
        return combined

    def _measured(self) -> dict[str, float]:
        """Return the step's metrics."""
        metrics = {}
        if self.remembers:  # without a memory a message would have to be decoded again
            metrics["compression_error"] = sum(coded.error_squared() for coded in self._coded) ** 0.5
        if merged := [coded for coded in self._coded if isinstance(coded, MergedSum)]:
            num_values = sum(coded.num_values for coded in merged)
            metrics["sparsity"] = 1.0 - sum(coded.num_sent for coded in merged) / num_values
        return metrics

    def kept(self) -> dict[str, list[Tensor | None]]:
        kept: dict[str, list[Tensor | None]] = {}
        for unit, coded in zip(self._units, self._coded, strict=True):
            for kind, tensors in coded.kept().items():
                row = kept.setdefault(kind, [None] * len(self._updates))
                for index, tensor in zip(unit, tensors, strict=True):
                    row[index] = tensor
        return kept

    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        for unit, coded in zip(self._units, self._coded, strict=True):
            coded.keep({kind: [row[index] for index in unit] for kind, row in kept.items()})
