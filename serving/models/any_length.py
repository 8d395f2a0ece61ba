"""Batches of samples of any length: grouped, padded, answered as each alone. Does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from orchestray.platform.errors import CheckpointError
from orchestray.serving.models.padding import Padding, bucket
from orchestray.serving.models.signature import Output, Sample, TensorSpec

_log = logging.getLogger("orchestray.serving")

_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""Largest difference between the answers to a sample that is padded and to the sample alone: sums have other orders."""


class AnyLength:
    """A model that answers samples of any length, by forward passes on samples of one.

    Where the model takes a mask, and answers padded samples as it does them alone, samples of about one length share a
    pass. Elsewhere padding would change answers, so that only those of exactly one length do.

    Args:
        forward: answers samples of one length, by one pass.
        padding: the inputs of variable length.
        name: name of the model.
        in_buckets: True to pad to few lengths, for a model that is compiled for each; False: to the longest.
    """

    def __init__(
        self, forward: Callable[[Sequence[Sample]], list[Output]], padding: Padding, name: str, *, in_buckets: bool
    ) -> None:
        self._forward, self._padding, self._name = forward, padding, name
        self._in_buckets = in_buckets
        self._is_masked = padding.mask is not None
        self._varying: dict[str, list[int]] = {}
        """Maps an output to its dimensions, in a sample, that are as long as the inputs."""

    def run(self, samples: Sequence[Sample]) -> list[Output]:
        """Return an answer for each sample."""
        lengths = [self._length(sample) for sample in samples]
        groups: dict[int, list[int]] = {}
        for place, length in enumerate(lengths):
            size = bucket(length, self._padding.most) if self._is_masked else length
            groups.setdefault(size, []).append(place)
        answers: dict[int, Output] = {}
        for size, places in groups.items():
            longest = size if self._in_buckets else max(lengths[place] for place in places)
            answered = self._forward([self._padded(samples[place], longest) for place in places])
            for place, answer in zip(places, answered, strict=True):
                answers[place] = self._cut(answer, lengths[place])
        return [answers[place] for place in range(len(samples))]

    def outputs(self, sample: Sample, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Find what depends on the length: dimensions of outputs; and answers, if a mask does not keep them.

        Args:
            sample: the model's example.
            specs: outputs for it.

        Returns:
            the outputs, with None for dimensions that are as long as the inputs.

        Raises:
            CheckpointError: the model answers no other length.
        """
        length = self._length(sample)
        sample, length = (sample, length) if length > 1 else (self._padded(sample, 2), 2)
        short = {name: each[: length // 2] if name in self._padding.values else each for name, each in sample.items()}
        try:
            (whole,), (alone,) = self._forward([sample]), self._forward([short])
        except Exception as error:
            raise CheckpointError(
                f"by its task's padding its samples may have any length, and it does not answer one of {length // 2}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for name, array in whole.items():
            sizes = zip(array.shape, alone[name].shape, strict=True)
            self._varying[name] = [axis for axis, (one, other) in enumerate(sizes) if one != other]
        if self._is_masked:
            _, padded = self._forward([sample, self._padded(short, length)])
            found = self._cut(padded, length // 2)
            self._is_masked = all(
                found[name].shape == alone[name].shape and np.allclose(found[name], alone[name], _RELATIVE, _ABSOLUTE)
                for name in alone
            )
            if not self._is_masked:
                _log.warning(
                    "%s answers a padded sample otherwise than the sample alone, though it takes the mask %s: only "
                    "samples of one length share a batch",
                    self._name,
                    self._padding.mask,
                )
        return tuple(replace(spec, shape=self._shape(spec)) for spec in specs)

    def _shape(self, spec: TensorSpec) -> tuple[int | None, ...]:
        varying = self._varying[spec.name]
        return tuple(None if axis in varying else size for axis, size in enumerate(spec.shape))

    def _length(self, sample: Sample) -> int:
        return len(sample[next(iter(self._padding.values))])

    def _padded(self, sample: Sample, length: int) -> Sample:
        """Return a sample whose inputs of variable length have this one."""
        padded = dict(sample)
        for name, value in self._padding.values.items():
            missing = length - len(sample[name])
            rest = np.full((missing, *sample[name].shape[1:]), value, sample[name].dtype)
            padded[name] = np.concatenate([sample[name], rest]) if missing else sample[name]
        return padded

    def _cut(self, output: Output, length: int) -> Output:
        """Return an output without what belongs to padding."""
        if not self._is_masked:
            return output
        return {
            name: array[tuple(slice(length if axis in self._varying[name] else None) for axis in range(array.ndim))]
            for name, array in output.items()
        }
