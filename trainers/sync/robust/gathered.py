"""An exchange in which every replica gets every replica's gradient, and all combine them by the same rule.

A rule that withstands Byzantine workers needs this (Blanchard et al. 2017, section 2, there at a parameter server): a
sum on the way would already contain what an attacker sent. Each replica sends (P-1) times the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.platform.errors import TrainingError
from orchestray.trainers.aggregation.base import Aggregation, too_few
from orchestray.trainers.compression.base import Compressor
from orchestray.trainers.compression.registry import make_compressor
from orchestray.trainers.sync.common.combined_gradients import CombinedGradients, typed, units_of
from orchestray.trainers.sync.common.messages import gather_messages


class Gathered(CombinedGradients):
    """An all-gather of the gradients, and an aggregation of them.

    The loop weighs a replica's loss by its share of the batch. Here its gradient is first turned into the mean over its
    own samples, so that a rule compares like with like. A replica without samples takes no part.

    If a model is split over several workers, each combines what it holds: a rule that compares whole gradients (Krum)
    then compares parts.

    Args:
        aggregation: the rule.
        compression: the config's `strategy.compression` section, of a type without a memory: each replica's gradient is
            sent compressed.
        seed: seed of the run, for random rounding.
        bucket_mb: MiB of each replica's gradient that are gathered at once, if the rule combines each element by
            itself. Other rules, and compression, need memory for all gradients of all replicas.
    """

    def __init__(
        self,
        aggregation: Aggregation,
        *,
        compression: Mapping[str, Any] | None = None,
        seed: int = 0,
        bucket_mb: float = 25.0,
    ) -> None:
        super().__init__()
        self._aggregation = aggregation
        self._compression = dict(compression or {"type": "none"})
        self._seed = seed
        self._bucket_bytes = int(bucket_mb * (1 << 20))
        self._units: list[list[int]] = []
        self._compressors: list[Compressor] = []
        """One compressor a unit; empty without compression."""

    def prepare(self, model: nn.Module) -> None:
        self._units = units_of(self._updates)
        self._compressors = []
        if self._compression["type"] == "none":
            return
        for unit in self._units:
            compressor = make_compressor(**self._compression, seed=self._seed, worker=self.joined().rank)
            compressor.init([self._parameters[index].detach() for index in unit])
            self._compressors.append(compressor)

    def combine(self, gradients: list[Tensor], flags: list[bool]) -> list[Tensor]:
        collective = self.joined()
        weights = collective.all_gather(torch.tensor([self.fraction], dtype=torch.float64)).flatten()
        takes_part = weights > 0
        self._check(int(takes_part.sum()))
        combined = list(gradients)
        for number, unit in enumerate(self._units):
            mine = [gradients[index] for index in unit]
            if self.fraction > 0:
                mine = [gradient / self.fraction for gradient in mine]
            if self._compressors:
                vectors = self._decoded(self._compressors[number], mine)
                flat = self._aggregation(vectors[takes_part], weights[takes_part])
            else:
                parts = torch.split(flatten(mine), self._elements_at_once(mine))
                flat = torch.cat(
                    [self._aggregation(collective.all_gather(p)[takes_part], weights[takes_part]) for p in parts]
                )
            for index, gradient in zip(unit, typed(unflatten(flat, mine), mine), strict=True):
                combined[index] = gradient
        return combined

    def _decoded(self, compressor: Compressor, mine: list[Tensor]) -> Tensor:
        """Return every replica's decoded gradient, a row each."""
        message = compressor.compress(mine, step=self._step)
        messages = gather_messages(self.joined(), message, compressor.message_bytes)
        return torch.stack([flatten(compressor.decompress(each)) for each in messages])

    def _elements_at_once(self, mine: list[Tensor]) -> int:
        if not self._aggregation.is_coordinatewise:
            return max(1, sum(gradient.numel() for gradient in mine))
        return max(1, self._bucket_bytes // mine[0].element_size())

    def _check(self, num_workers: int) -> None:
        rule = self._aggregation
        if num_workers < rule.min_workers:
            raise TrainingError(too_few(rule, f"{num_workers} of {self.joined().size}", self._step))
