"""The parameters of compressions (`strategy.compression`)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from orchestray.platform.config.base import AboveZero, BelowOne, Count, Flag, Positive, Section

Ratio = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1)]


class CompressionParams(Section):
    """The parameters of a compression, with facts about its scheme."""

    is_memoryless: ClassVar[bool] = False
    """True if the scheme has no state between steps, unless error feedback is enabled."""


class NoCompression(CompressionParams):
    """Uncompressed gradients."""

    type: Literal["none"] = "none"
    """The compression `none`."""


class Lossy(CompressionParams):
    """The parameters that all lossy compressions share."""

    error_feedback: Flag = True
    """True to add what is lost in one step to the message of the next."""


class Float16(Lossy):
    """Half precision: 16 bits per value."""

    is_memoryless: ClassVar[bool] = True

    type: Literal["float16"]
    """The compression `float16`."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding to the nearest value, or at random to one of the two neighbours without bias."""
    error_feedback: Flag = False
    """True to add what is lost in one step to the message of the next."""


class BFloat16(Lossy):
    """bfloat16: 16 bits per value with the range of float32."""

    is_memoryless: ClassVar[bool] = True

    type: Literal["bfloat16"]
    """The compression `bfloat16`."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding to the nearest value, or at random to one of the two neighbours without bias."""
    error_feedback: Flag = False
    """True to add what is lost in one step to the message of the next."""


class Qsgd(Lossy):
    """QSGD (Alistarh et al., 2017): values rounded at random to a few levels of the norm of their bucket."""

    is_memoryless: ClassVar[bool] = True

    type: Literal["qsgd"]
    """The compression `qsgd`."""
    bits: Annotated[int, Field(strict=True, ge=2, le=8)] = 4
    """Bits per value, including its sign."""
    bucket: Positive = 512
    """Number of values that share a scale."""
    error_feedback: Flag = False
    """True to add what is lost in one step to the message of the next."""
    huffman: Flag = False
    """True to send the levels in a Huffman code."""


class TernGrad(Lossy):
    """TernGrad (Wen et al., 2017): each value becomes -1, 0 or 1 times the largest of its tensor, at random."""

    is_memoryless: ClassVar[bool] = True

    type: Literal["terngrad"]
    """The compression `terngrad`."""
    clip: AboveZero | None = 2.5
    """Largest magnitude of a value, in standard deviations of its tensor; null: no clipping."""
    error_feedback: Flag = False
    """True to add what is lost in one step to the message of the next."""
    huffman: Flag = False
    """True to send the values in a Huffman code."""


class OneBit(Lossy):
    """1-bit SGD (Seide et al., 2014): the sign of each value, and scales that the signs are multiplied by."""

    type: Literal["onebit"]
    """The compression `onebit`."""
    scale: Literal["tensor", "row"] = "tensor"
    """One scale per tensor, or two per row, for positive and negative values, which momentum needs."""


class TopK(Lossy):
    """The largest values of each tensor, with their indices."""

    type: Literal["topk"]
    """The compression `topk`."""
    ratio: Ratio = 0.01
    """Fraction of the values to send."""


class Threshold(Lossy):
    """The values of at least a given magnitude (Strom, 2015)."""

    type: Literal["threshold"]
    """The compression `threshold`."""
    threshold: AboveZero
    """Smallest absolute value to send."""
    values: Literal["exact", "threshold"] = "exact"
    """Values as they are; or, as in the paper, the threshold with the sign of each, and the rest later."""


class AdaptiveThreshold(Lossy):
    """The values above a threshold that follows the gradients (Dryden et al., 2016)."""

    type: Literal["adaptive_threshold"]
    """The compression `adaptive_threshold`."""
    ratio: Ratio = 0.01
    """Approximate fraction of the values to send."""
    values: Literal["exact", "means"] = "exact"
    """Values as they are; or, as in the paper, the mean of a tensor's sent values of each sign, and a bit for each."""


class Dgc(CompressionParams):
    """Deep gradient compression (Lin et al., 2018): the largest values of an accumulated momentum."""

    type: Literal["dgc"]
    """The compression `dgc`."""
    ratio: Ratio = 0.001
    """Fraction of the values to send, after the warm-up."""
    momentum: BelowOne = 0.9
    """Momentum of the local accumulation; the optimizer's own momentum should then be 0."""
    clip: AboveZero | None = None
    """Largest norm of a worker's gradient before it is accumulated, times the square root of the number of workers."""
    warmup_steps: Count = 0
    """Number of steps over which the ratio falls from a quarter."""
    error_feedback: Flag = True
    """True to keep unsent values; false only to demonstrate the loss without it."""


class PowerSgd(Lossy):
    """PowerSGD (Vogels et al., 2019): each matrix as the product of two thin ones."""

    type: Literal["powersgd"]
    """The compression `powersgd`."""
    rank: Positive = 2
    """Number of columns of the thin matrices."""
