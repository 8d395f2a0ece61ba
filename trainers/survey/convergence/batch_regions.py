"""The trade-off of the minibatch size: regions A (too small), B (both are well) and C (too large).

After Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning" (2019). Samples a second rise with the
minibatch until the machine is busy. Accuracy after the same number of samples falls once the minibatch is too large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestray.platform.comm.allreduce.costs import AlphaBeta


@dataclass(frozen=True)
class StepTime:
    """The time of a step: `fixed_s`, and `sample_s` for each sample of the minibatch."""

    fixed_s: float
    sample_s: float

    @classmethod
    def fitted(cls, batch_sizes: Sequence[int], steps_s: Sequence[float]) -> StepTime:
        """Return the line with the least squared relative errors to the times; neither part is negative.

        Args:
            batch_sizes: two different sizes or more.
            steps_s: seconds of a step of each.

        Raises:
            ValueError: fewer sizes, or a time that is not above zero.
        """
        line = AlphaBeta.fit(batch_sizes, steps_s)
        return cls(line.alpha_s, line.beta_s_per_byte)

    def step_s(self, batch_size: int) -> float:
        """Return the seconds of a step."""
        return self.fixed_s + self.sample_s * batch_size

    def samples_per_s(self, batch_size: int) -> float:
        """Return the samples a second, which rise with the size to 1 / `sample_s`."""
        return batch_size / self.step_s(batch_size)

    @property
    def half_speed_size(self) -> float:
        """The size with half of the samples a second that no size exceeds: half of its step is `fixed_s`."""
        return self.fixed_s / self.sample_s if self.sample_s else float("inf")


def regions(accuracies: Mapping[int, float], time: StepTime, *, tolerance: float) -> dict[int, str]:
    """Return the region of each minibatch size.

    A: less than half of the speed that no size exceeds. C: above the largest size whose accuracy is within the
    tolerance of the best. B: neither. A size that is both, "A, C", is of a machine too fast for the task.

    Args:
        accuracies: accuracy by minibatch size after the same number of samples, each size with its own best rate.
        time: the time of a step.
        tolerance: accuracy below the best that counts as equal.
    """
    best = max(accuracies.values())
    largest = max(size for size, accuracy in accuracies.items() if accuracy >= best - tolerance)
    found = {}
    for size in accuracies:
        names = ["A"] * (size < time.half_speed_size) + ["C"] * (size > largest)
        found[size] = ", ".join(names) or "B"
    return found
