"""An aggregation rule with what a scheme must know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.trainers.aggregation import rules


@dataclass(frozen=True)
class Aggregation:
    """Combines a matrix of gradients, a row a worker, into one."""

    kind: str
    """As in the config."""
    byzantine: int
    """f: so many workers may send anything."""
    min_workers: int
    """With fewer the rule promises nothing."""
    is_coordinatewise: bool
    """Whether each element is combined by itself, so that parts of the vectors may be combined apart."""
    rule: Callable[[Tensor, Tensor], Tensor]
    """Of vectors `[workers, elements]` and their weights `[workers]`."""

    def __call__(self, vectors: Tensor, weights: Tensor) -> Tensor:
        """The combined gradient.

        Args:
            vectors: the mean gradient of each worker that has samples, `[workers, elements]`.
            weights: its part of the batch, `[workers]`; only the mean looks at them.

        Returns:
            `[elements]`.

        Raises:
            ValueError: there are fewer than `min_workers` rows.
        """
        return self.rule(vectors, weights)


def make_aggregation(type: str = "mean", *, byzantine: int = 0) -> Aggregation:  # noqa: A002 - the config's key
    """The aggregation of a config's `strategy.aggregation` section, given as keyword arguments.

    Raises:
        ConfigError: there is no such rule.
    """
    f = byzantine
    match type:
        case "mean":
            return Aggregation(type, 0, 1, True, rules.mean)
        case "krum":
            return Aggregation(type, f, 2 * f + 3, False, lambda vectors, _: rules.krum(vectors, f))
        case "multi_krum":
            return Aggregation(type, f, 2 * f + 3, False, lambda vectors, _: rules.multi_krum(vectors, f))
        case "median":
            return Aggregation(type, f, 2 * f + 1, True, lambda vectors, _: rules.median(vectors))
        case "trimmed_mean":
            return Aggregation(type, f, 2 * f + 1, True, lambda vectors, _: rules.trimmed_mean(vectors, f))
    raise ConfigError(
        f"strategy.aggregation.type: {type!r} is not an aggregation; it is mean, krum, multi_krum, median or "
        "trimmed_mean."
    )
