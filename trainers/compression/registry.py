"""The registry of compressions, and the creation of a compressor by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.platform.config.registry import Registry

if TYPE_CHECKING:
    from orchestray.trainers.compression.base import Compressor
    from orchestray.trainers.compression.params import CompressionParams

_PARAMS = "orchestray.trainers.compression.params"
_HERE = "orchestray.trainers.compression"

COMPRESSIONS: Registry[CompressionParams] = Registry(
    "strategy.compression",
    {
        "none": (f"{_PARAMS}:NoCompression", None),
        "float16": (f"{_PARAMS}:Float16", f"{_HERE}.half_precision:Float16"),
        "bfloat16": (f"{_PARAMS}:BFloat16", f"{_HERE}.half_precision:BFloat16"),
        "qsgd": (f"{_PARAMS}:Qsgd", f"{_HERE}.qsgd:Qsgd"),
        "terngrad": (f"{_PARAMS}:TernGrad", f"{_HERE}.terngrad:TernGrad"),
        "onebit": (f"{_PARAMS}:OneBit", f"{_HERE}.onebit:OneBit"),
        "topk": (f"{_PARAMS}:TopK", f"{_HERE}.topk:TopK"),
        "threshold": (f"{_PARAMS}:Threshold", f"{_HERE}.threshold:Threshold"),
        "adaptive_threshold": (f"{_PARAMS}:AdaptiveThreshold", f"{_HERE}.adaptive_threshold:AdaptiveThreshold"),
        "dgc": (f"{_PARAMS}:Dgc", f"{_HERE}.dgc:Dgc"),
        "powersgd": (f"{_PARAMS}:PowerSgd", f"{_HERE}.powersgd:PowerSgd"),
    },
    noun="a compression",
    default="none",
)


def make_compressor(
    type: str,  # noqa: A002 - the config's key
    *,
    seed: int = 0,
    worker: int = 0,
    num_workers: int = 1,
    **arguments: Any,
) -> Compressor:
    """Create the compressor of a config's `strategy.compression` section; the caller must then call its `init`.

    Args:
        type: any but "none".
        seed: seed of the run.
        worker: number of the sender, from 0 (not `rank`, which is PowerSGD's).
        num_workers: number of senders.
        arguments: the other keys of the section.

    Raises:
        ConfigError: the type is unknown.
    """
    made: Compressor = COMPRESSIONS.find(type)(**arguments, seed=seed, worker=worker, num_workers=num_workers)
    return made
