"""Aggregation: how the gradients of several workers become one."""

from __future__ import annotations

if __name__ != "orchestray.trainers.aggregation":
    raise ImportError("import orchestray.trainers.aggregation: under another name its modules would be loaded twice")

from orchestray.trainers.aggregation.base import Aggregation, make_aggregation
from orchestray.trainers.aggregation.rules import (
    krum,
    krum_scores,
    krum_tolerates,
    mean,
    median,
    multi_krum,
    trimmed_mean,
    trimming_tolerates,
)

__all__ = [
    "Aggregation",
    "krum",
    "krum_scores",
    "krum_tolerates",
    "make_aggregation",
    "mean",
    "median",
    "multi_krum",
    "trimmed_mean",
    "trimming_tolerates",
]
