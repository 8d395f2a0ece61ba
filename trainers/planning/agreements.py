"""The bytes that workers send to agree on what they did, besides the gradients.

Replicas of whole models in step agree along with their gradients, which a dry run sees. The others sum a few numbers
over all workers: pipelines after each step, those that need not wait for each other after several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.trainers.loop.loop import steps_to_agreement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.planning.run_length import RunLength

_VALUE_BYTES = 8
_MOST_STEPS = 1000
"""Steps that are looked at of a longer run."""


def agreed_bytes(settings: ReplicaSettings, length: RunLength) -> float:
    """Return the bytes that all workers send for it, as a mean over the steps of whole epochs.

    Args:
        settings: settings of the run.
        length: its length.
    """
    size, num_steps = settings.layout.size, [*_steps_between(settings, length)]
    # The votes, the bytes sent, whether buffers differ, the bytes saved; and the loss of each step.
    is_compressed = settings.compression.get("type", "none") != "none"
    beside = 3 + (not settings.diverges) + is_compressed
    sent: int = sum(size * -(-2 * (size - 1) * (beside + steps) * _VALUE_BYTES // size) for steps in num_steps)
    if settings.is_streaming:  # gathered: the staleness of each micro-batch, and the time
        sent += size * (size - 1) * (settings.accumulate + 1) * _VALUE_BYTES * sum(num_steps)
    return sent / sum(num_steps)


def _steps_between(settings: ReplicaSettings, length: RunLength) -> Iterator[int]:
    """Yield the number of steps before each agreement since the one before it."""
    if not (settings.diverges or settings.is_streaming):
        yield 1
        return
    of_epoch = max(1, length.steps_per_epoch)
    last = min(length.num_steps or of_epoch, _MOST_STEPS)
    last = max(1, last // of_epoch) * of_epoch if last >= of_epoch else last
    every = (settings.checkpoint_every_steps, settings.validate_every_steps)
    step = 0
    while step < last:
        num_steps = steps_to_agreement(step, min(last, (step // of_epoch + 1) * of_epoch), every)
        yield num_steps
        step += num_steps
