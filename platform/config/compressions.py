"""The `strategy.compression` and `strategy.aggregation` sections: what is put on the wire, and how it is combined."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from orchestray.platform.config.base import AboveZero, BelowOne, Count, Flag, Positive, Section, type_or

Ratio = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1)]


class NoCompression(Section):
    """Gradients as they are."""

    type: Literal["none"] = "none"
    """The compression `none`."""


class Lossy(Section):
    """What every compression has."""

    error_feedback: Flag = True
    """Add what was lost in one step to what is sent in the next."""


class Float16(Lossy):
    """Half precision: 16 bits a value."""

    type: Literal["float16"]
    """The compression `float16`."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest value, or up or down at random with the right mean."""
    error_feedback: Flag = False
    """Add what was lost in one step to what is sent in the next."""


class BFloat16(Lossy):
    """Half the bits with the range of float32."""

    type: Literal["bfloat16"]
    """The compression `bfloat16`."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest value, or up or down at random with the right mean."""
    error_feedback: Flag = False
    """Add what was lost in one step to what is sent in the next."""


class Qsgd(Lossy):
    """QSGD (Alistarh et al., 2017): values rounded at random to a few levels of the norm of their bucket."""

    type: Literal["qsgd"]
    """The compression `qsgd`."""
    bits: Annotated[int, Field(strict=True, ge=2, le=8)] = 4
    """Bits a value, its sign among them."""
    bucket: Positive = 512
    """Values that share a scale."""
    error_feedback: Flag = False
    """Add what was lost in one step to what is sent in the next."""
    huffman: Flag = False
    """Send the levels in a Huffman code."""


class TernGrad(Lossy):
    """TernGrad (Wen et al., 2017): each value is -1, 0 or 1 times the largest of its tensor, at random."""

    type: Literal["terngrad"]
    """The compression `terngrad`."""
    clip: AboveZero | None = 2.5
    """Values are first cut to so many standard deviations of their tensor; null: not."""
    error_feedback: Flag = False
    """Add what was lost in one step to what is sent in the next."""
    huffman: Flag = False
    """Send the values in a Huffman code."""


class OneBit(Lossy):
    """1-bit SGD (Seide et al., 2014): the sign of each value, and the sizes that signs stand for."""

    type: Literal["onebit"]
    """The compression `onebit`."""
    scale: Literal["tensor", "row"] = "tensor"
    """One size a tensor; or two a row, for positive and negative values, as momentum needs."""


class TopK(Lossy):
    """The largest values of each tensor, with their places."""

    type: Literal["topk"]
    """The compression `topk`."""
    ratio: Ratio = 0.01
    """Part of the values that is sent."""


class Threshold(Lossy):
    """The values of at least a size (Strom, 2015)."""

    type: Literal["threshold"]
    """The compression `threshold`."""
    threshold: AboveZero
    """Smallest absolute value that is sent."""


class AdaptiveThreshold(Lossy):
    """The values above a size that follows the gradients (Dryden et al., 2016)."""

    type: Literal["adaptive_threshold"]
    """The compression `adaptive_threshold`."""
    ratio: Ratio = 0.01
    """Part of the values that is to be sent."""


class Dgc(Section):
    """Deep gradient compression (Lin et al., 2018): the largest values of an accumulated momentum."""

    type: Literal["dgc"]
    """The compression `dgc`."""
    ratio: Ratio = 0.001
    """Part of the values that is sent, after the warm-up."""
    momentum: BelowOne = 0.9
    """Of the local accumulation; the optimizer's own momentum should then be 0."""
    clip: AboveZero | None = None
    """Largest norm of a worker's gradient, before it is accumulated, times the square root of the workers."""
    warmup_steps: Count = 0
    """Steps over which the ratio falls from a quarter."""
    error_feedback: Flag = True
    """Keep what was not sent; false only to show what is lost without."""


class PowerSgd(Lossy):
    """PowerSGD (Vogels et al., 2019): each matrix as the product of two thin ones."""

    type: Literal["powersgd"]
    """The compression `powersgd`."""
    rank: Positive = 2
    """Columns of the thin matrices."""


Compression = Annotated[
    Annotated[NoCompression, Tag("none")]
    | Annotated[Float16, Tag("float16")]
    | Annotated[BFloat16, Tag("bfloat16")]
    | Annotated[Qsgd, Tag("qsgd")]
    | Annotated[TernGrad, Tag("terngrad")]
    | Annotated[OneBit, Tag("onebit")]
    | Annotated[TopK, Tag("topk")]
    | Annotated[Threshold, Tag("threshold")]
    | Annotated[AdaptiveThreshold, Tag("adaptive_threshold")]
    | Annotated[Dgc, Tag("dgc")]
    | Annotated[PowerSgd, Tag("powersgd")],
    type_or("none"),
]


class Mean(Section):
    """The mean over the samples."""

    type: Literal["mean"] = "mean"
    """The aggregation `mean`, weighted by samples."""


class Robust(Section):
    """What every rule has that withstands workers that send anything."""

    byzantine: Count = 1
    """Workers that may send anything."""


class Krum(Robust):
    """Krum (Blanchard et al., 2017): the gradient that is nearest to its neighbours."""

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


Aggregation = Annotated[
    Annotated[Mean, Tag("mean")]
    | Annotated[Krum, Tag("krum")]
    | Annotated[MultiKrum, Tag("multi_krum")]
    | Annotated[Median, Tag("median")]
    | Annotated[TrimmedMean, Tag("trimmed_mean")],
    type_or("mean"),
]
