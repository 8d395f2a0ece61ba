"""Activation recomputation: parts of the model run again in the backward pass instead of keeping their activations.
Also a meter of the memory that activations take.
"""

from __future__ import annotations

if __name__ != "orchestray.trainers.parallel.recompute":
    raise ImportError(
        "import orchestray.trainers.parallel.recompute: under another name its modules would be loaded twice"
    )

from orchestray.trainers.parallel.recompute.chain import Chain
from orchestray.trainers.parallel.recompute.choose import Recomputed, find_blocks, recompute
from orchestray.trainers.parallel.recompute.meter import ActivationMeter

__all__ = ["ActivationMeter", "Chain", "Recomputed", "find_blocks", "recompute"]
