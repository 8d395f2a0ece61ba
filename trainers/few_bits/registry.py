"""The registry of quantizations while training."""

from __future__ import annotations

from orchestray.platform.config.registry import Registry
from orchestray.trainers.few_bits.params import QuantizeSection

_PARAMS = "orchestray.trainers.few_bits.params"
_HERE = "orchestray.trainers.few_bits"

QUANTIZATIONS: Registry[QuantizeSection] = Registry(
    "train.quantize",
    {
        "bnn": (f"{_PARAMS}:Bnn", f"{_HERE}.bnn:Bnn"),
        "twn": (f"{_PARAMS}:Twn", f"{_HERE}.twn:Twn"),
        "dorefa": (f"{_PARAMS}:DoReFa", f"{_HERE}.dorefa:DoReFa"),
        "flexpoint": (f"{_PARAMS}:FlexPoint", f"{_HERE}.flexpoint:FlexPoint"),
    },
    noun="a quantization",
)
