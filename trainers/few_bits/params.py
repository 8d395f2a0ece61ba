"""The parameters of quantization while training (`train.quantize`)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from orchestray.platform.config.base import AboveZero, AtLeastZero, Positive, Section

Bits = Annotated[int, Field(strict=True, ge=1, le=16)]
Ends = Literal["float", "quantized"]


class QuantizeSection(Section):
    """The parameters of a quantization, with facts about its scheme."""

    clips_weights: ClassVar[bool] = False
    """True if the weights are clipped after each update."""
    keeps_history: ClassVar[bool] = False
    """True if the scheme has state between steps, which comes from the samples of the whole batch."""
    type: str
    ends: Ends


class Bnn(QuantizeSection):
    """Binarized neural networks (Hubara, Courbariaux et al., 2016): weights and inputs of layers are -1 or 1."""

    clips_weights: ClassVar[bool] = True

    type: Literal["bnn"]
    """The quantization `bnn`."""
    ends: Ends = "quantized"
    """First and last layer of the model: `quantized` like the others, or `float`."""


class Twn(QuantizeSection):
    """Ternary weight networks (Li et al., 2016): the weights of a layer are -a, 0 or a."""

    type: Literal["twn"]
    """The quantization `twn`."""
    threshold: AboveZero = 0.7
    """Weights up to this factor of the layer's mean magnitude become 0."""
    ends: Ends = "quantized"
    """First and last layer of the model: `quantized` like the others, or `float`."""


class DoReFa(QuantizeSection):
    """DoReFa-Net (Zhou et al., 2016): weights, inputs of layers and gradients of their outputs have few bits."""

    type: Literal["dorefa"]
    """The quantization `dorefa`."""
    weight_bits: Bits = 1
    """Bits of a weight; with 1 it is the layer's mean magnitude with a sign."""
    activation_bits: Bits | None = 2
    """Bits of an input of a layer, which is clipped to 0 and 1; null: floating-point numbers as they are."""
    gradient_bits: Bits | Literal["ternary"] | None = 6
    """Bits of a gradient of a layer's outputs, rounded at random without bias; `ternary`: minus the largest of its
    sample, 0 or the largest; null: floating-point numbers."""
    ends: Ends = "float"
    """First and last layer of the model: `float`, or `quantized` like the others."""


class FlexPoint(QuantizeSection):
    """Flexpoint (Köster et al., 2017): tensors of integers with one exponent each, predicted from the steps before."""

    keeps_history: ClassVar[bool] = True

    type: Literal["flexpoint"]
    """The quantization `flexpoint`."""
    mantissa_bits: Annotated[int, Field(strict=True, ge=4, le=16)] = 16
    """Bits of the integers, including the sign."""
    window: Positive = 16
    """Number of steps whose largest numbers predict the next one."""
    headroom: AboveZero = 2.0
    """Factor on the prediction."""
    deviations: AtLeastZero = 3.0
    """Standard deviations over the window that are added to its mean."""
    ends: Ends = "quantized"
    """First and last layer of the model: `quantized` like the others, or `float`."""
