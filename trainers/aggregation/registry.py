"""Aggregation rules by name."""

from __future__ import annotations

from orchestray.platform.config.base import Section
from orchestray.platform.config.registry import Registry

_PARAMS = "orchestray.trainers.aggregation.params"
_HERE = "orchestray.trainers.aggregation.base"

AGGREGATIONS: Registry[Section] = Registry(
    "strategy.aggregation",
    {
        "mean": (f"{_PARAMS}:Mean", f"{_HERE}:mean"),
        "krum": (f"{_PARAMS}:Krum", f"{_HERE}:krum"),
        "multi_krum": (f"{_PARAMS}:MultiKrum", f"{_HERE}:multi_krum"),
        "median": (f"{_PARAMS}:Median", f"{_HERE}:median"),
        "trimmed_mean": (f"{_PARAMS}:TrimmedMean", f"{_HERE}:trimmed_mean"),
    },
    noun="an aggregation",
    default="mean",
)
