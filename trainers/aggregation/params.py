"""The parameters of aggregation rules (`strategy.aggregation`)."""

from __future__ import annotations

from typing import Literal

from orchestray.platform.config.base import Count, Section


class Mean(Section):
    """The mean over the samples."""

    type: Literal["mean"] = "mean"
    """The aggregation `mean`, weighted by samples."""


class Robust(Section):
    """The parameters that all robust rules share, which tolerate workers that send anything."""

    byzantine: Count = 1
    """Number of workers that may send anything."""


class Krum(Robust):
    """Krum (Blanchard et al., 2017): the gradient that is closest to its neighbours."""

    type: Literal["krum"]
    """The aggregation `krum`."""


class MultiKrum(Robust):
    """Multi-Krum (Blanchard et al., 2017): the mean of the gradients with the best Krum scores."""

    type: Literal["multi_krum"]
    """The aggregation `multi_krum`."""


class Median(Robust):
    """The median of each coordinate (Yin et al., 2018)."""

    type: Literal["median"]
    """The aggregation `median`."""


class TrimmedMean(Robust):
    """The mean of each coordinate without its smallest and largest values (Yin et al., 2018)."""

    type: Literal["trimmed_mean"]
    """The aggregation `trimmed_mean`."""
