"""The cost of a step's products of matrices on units that take sizes in multiples of a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from orchestray.trainers.analysis.products import UNITS, Product
from orchestray.trainers.planning.layer_watch import plain_name


@dataclass(frozen=True)
class PaddingCost:
    """The multiplications of a step with all matrices padded for a kind of units."""

    unit: str
    """Name of the units, a key of `UNITS`."""
    multiple: int
    """Number that divides each size of a matrix."""
    multiplications: int
    """Multiplications of the products as they are, forward and backward."""
    padded: int
    """Multiplications of the padded products."""
    worst: str
    """Name of the layer to whose products padding adds most; empty: what is in none."""
    worst_added: int
    """Multiplications that padding adds there."""

    @property
    def factor(self) -> float:
        """Padded multiplications over those as they are."""
        return self.padded / self.multiplications

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "factor": self.factor}


def padding_costs(products: Iterable[tuple[str, Product]]) -> Iterator[PaddingCost]:
    """Yield what padding costs for each kind of units; nothing if there are no products.

    Args:
        products: products with the layer of each, named as a `Recorder` does.
    """
    there = [(plain_name(layer), product) for layer, product in products if product.multiplications]
    if not there:
        return
    total = sum(product.multiplications for _, product in there)
    for unit, multiple in UNITS.items():
        added: Counter[str] = Counter()
        for layer, product in there:
            added[layer] += product.padded(multiple).multiplications - product.multiplications
        worst, most = max(added.items(), key=lambda each: each[1])
        yield PaddingCost(unit, multiple, total, total + added.total(), worst, most)
