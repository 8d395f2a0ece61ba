"""An aggregation rule with the properties that a scheme needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from orchestray.trainers.aggregation import rules
from orchestray.trainers.aggregation.registry import AGGREGATIONS


@dataclass(frozen=True)
class Aggregation:
    """Combines a matrix of gradients, one row per worker, into one gradient."""

    kind: str
    """Name in the config."""
    byzantine: int
    """Number f of workers that may send anything."""
    min_workers: int
    """Smallest number of workers for which the rule has its guarantees."""
    is_coordinatewise: bool
    """True if each element is combined independently, so that parts of the vectors may be combined separately."""
    rule: Callable[[Tensor, Tensor], Tensor]
    """Maps vectors `[workers, elements]` and their weights `[workers]` to the combined vector."""

    def __call__(self, vectors: Tensor, weights: Tensor) -> Tensor:
        """Combine the gradients.

        Args:
            vectors: mean gradient of each worker that has samples, `[workers, elements]`.
            weights: each worker's part of the batch, `[workers]`; used only by the mean.

        Returns:
            `[elements]`.

        Raises:
            ValueError: there are fewer than `min_workers` rows.
        """
        return self.rule(vectors, weights)


def too_few(rule: Aggregation, num_workers: str, step: int) -> str:
    """Return the error of a batch of which too few workers have samples.

    Args:
        rule: rule that needs more.
        num_workers: number of those that have some, in words.
        step: step of the batch.
    """
    return (
        f"Only {num_workers} workers have samples of the batch of step {step}, and strategy.aggregation "
        f"{rule.kind!r} needs {rule.min_workers} to withstand {rule.byzantine} Byzantine ones. Choose train.batch_size "
        "so that the last batch of an epoch has a sample for each, or set train.drop_last to true."
    )


def mean() -> Aggregation:
    """Return the weighted mean, which trusts every worker."""
    return Aggregation("mean", 0, 1, True, rules.mean)


class Krum:
    """The rule that takes the gradient with the best Krum score, and counts whose it was."""

    def __init__(self, byzantine: int) -> None:
        self._byzantine = byzantine
        self._picked: list[int] = []
        """Number of times that each row was taken."""

    def __call__(self, vectors: Tensor, _: Tensor | None = None) -> Tensor:
        """Return the row that was taken, `[elements]`; arguments and errors are those of `rules.krum_scores`."""
        chosen = rules.krum_choice(vectors, self._byzantine)
        self._picked += [0] * (len(vectors) - len(self._picked))
        self._picked[chosen] += 1
        return vectors[chosen].clone()

    def run_report(self) -> dict[str, Any]:
        """Return how often the gradient of each worker that had samples was `picked`; empty before one was."""
        return {"picked": list(self._picked)} if self._picked else {}


def krum(byzantine: int = 0) -> Aggregation:
    """Return Krum, which tolerates `byzantine` workers."""
    return Aggregation("krum", byzantine, 2 * byzantine + 3, False, Krum(byzantine))


def multi_krum(byzantine: int = 0) -> Aggregation:
    """Return Multi-Krum, which tolerates `byzantine` workers."""
    rule = lambda vectors, _: rules.multi_krum(vectors, byzantine)  # noqa: E731
    return Aggregation("multi_krum", byzantine, 2 * byzantine + 3, False, rule)


def median(byzantine: int = 0) -> Aggregation:
    """Return the median of each coordinate, which tolerates `byzantine` workers."""
    return Aggregation("median", byzantine, 2 * byzantine + 1, True, lambda vectors, _: rules.median(vectors))


def trimmed_mean(byzantine: int = 0) -> Aggregation:
    """Return the trimmed mean of each coordinate, which tolerates `byzantine` workers."""
    rule = lambda vectors, _: rules.trimmed_mean(vectors, byzantine)  # noqa: E731
    return Aggregation("trimmed_mean", byzantine, 2 * byzantine + 1, True, rule)


def make_aggregation(type: str = "mean", **arguments: Any) -> Aggregation:  # noqa: A002 - the config's key
    """Create the aggregation of a `strategy.aggregation` section, given as keyword arguments.

    Raises:
        ConfigError: the rule is unknown.
    """
    made: Aggregation = AGGREGATIONS.find(type)(**arguments)
    return made
