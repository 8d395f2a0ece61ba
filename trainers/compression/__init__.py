"""Compression of what is sent: float16, bfloat16, QSGD, TernGrad, one bit, top-k, thresholds, DGC, PowerSGD."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from orchestray.platform.errors import ConfigError
from orchestray.trainers.compression.adaptive_threshold import AdaptiveThreshold
from orchestray.trainers.compression.base import Compressor, SparseCompressor
from orchestray.trainers.compression.dgc import Dgc
from orchestray.trainers.compression.halves import Half
from orchestray.trainers.compression.onebit import OneBit
from orchestray.trainers.compression.powersgd import PowerSgd
from orchestray.trainers.compression.qsgd import Qsgd
from orchestray.trainers.compression.terngrad import TernGrad
from orchestray.trainers.compression.threshold import Threshold
from orchestray.trainers.compression.topk import TopK

__all__ = ["Compressor", "SparseCompressor", "make_compressor"]

_BY_TYPE: dict[str, Callable[..., Compressor]] = {
    "float16": partial(Half, torch.float16),
    "bfloat16": partial(Half, torch.bfloat16),
    "qsgd": Qsgd,
    "terngrad": TernGrad,
    "onebit": OneBit,
    "topk": TopK,
    "threshold": Threshold,
    "adaptive_threshold": AdaptiveThreshold,
    "dgc": Dgc,
    "powersgd": PowerSgd,
}


def make_compressor(
    type: str,  # noqa: A002 - the config's key
    *,
    seed: int = 0,
    worker: int = 0,
    num_workers: int = 1,
    **arguments: Any,
) -> Compressor:
    """The compressor of a config's `strategy.compression` section, given as keyword arguments; call its `init` next.

    Args:
        type: any but "none".
        seed: of the run.
        worker: who sends, from 0 (not `rank`, which is PowerSGD's).
        num_workers: how many send.
        arguments: the other keys of the section.

    Raises:
        ConfigError: there is no such compression.
    """
    if type not in _BY_TYPE:
        raise ConfigError(f"strategy.compression.type: {type!r} is not a compression; there are {', '.join(_BY_TYPE)}.")
    return _BY_TYPE[type](**arguments, seed=seed, worker=worker, num_workers=num_workers)
