"""The fewest micro-batches of a batch whose activations fit a memory.

As Oyama et al., "Accelerating Deep Learning Frameworks with Micro-batches" (2018), but for the activations of the
whole model: what a worker keeps for the backward pass is one micro-batch, and what the layers make of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestray.platform.errors import ConfigError
from orchestray.trainers.planning.recomputation import step_with
from orchestray.trainers.planning.subject import Subject


@dataclass(frozen=True)
class MicroBatching:
    """A batch cut into micro-batches, which are computed one after the other."""

    accumulate: int
    """Value of `train.accumulate`."""
    num_samples: int
    """Samples of the largest micro-batch."""
    peak_bytes: int
    """Most bytes kept for the backward pass at a time: activations, and the micro-batch."""


def fewest_micro_batches(subject: Subject, most_bytes: float) -> MicroBatching:
    """Return the fewest micro-batches that keep no more bytes for the backward pass than a number.

    Args:
        subject: the model with a whole batch, on `meta`.
        most_bytes: bytes that a worker has for activations.

    Raises:
        ConfigError: the batch cannot be cut here, or one sample keeps more.
    """
    kept: dict[int, int] = {}

    def fits(num_samples: int) -> bool:
        kept[num_samples] = _peak_bytes(subject, num_samples)
        return kept[num_samples] <= most_bytes

    if not fits(1):
        raise ConfigError(
            f"A micro-batch of one sample keeps {kept[1]:,} bytes for the backward pass, more than the "
            f"{most_bytes:,.0f} of --activation-mb: give more, or set train.recompute."
        )
    fitting, above = 1, subject.batch_size + 1
    while above - fitting > 1:
        middle = (fitting + above) // 2
        fitting, above = (middle, above) if fits(middle) else (fitting, middle)
    accumulate = -(-subject.batch_size // fitting)
    num_samples = -(-subject.batch_size // accumulate)
    return MicroBatching(accumulate, num_samples, _peak_bytes(subject, num_samples))


def _peak_bytes(subject: Subject, num_samples: int) -> int:
    micro_batch = None if subject.resize is None else subject.resize(num_samples)
    step = None if micro_batch is None else step_with(micro_batch, "none")
    if micro_batch is None or step is None:
        raise ConfigError(
            f"{subject.name}: its batch cannot be cut into micro-batches here. --activation-mb takes a config or a "
            "task, whose model runs on shapes alone."
        )
    return step.peak_bytes + micro_batch.batch_bytes
