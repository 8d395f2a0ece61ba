"""Memory of activations: how much it is, and computing parts of the model again in place of keeping what they made; and
the memory of a process.
"""

from __future__ import annotations

if __name__ != "orchestray.trainers.memory":
    raise ImportError("import orchestray.trainers.memory: under another name its modules would be loaded twice")

from orchestray.trainers.memory.chain import Chain
from orchestray.trainers.memory.meter import ActivationMeter
from orchestray.trainers.memory.recompute import Recomputed, find_blocks, recompute

__all__ = ["ActivationMeter", "Chain", "Recomputed", "find_blocks", "recompute"]
