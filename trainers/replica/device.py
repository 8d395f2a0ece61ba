"""Where a process computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from orchestray.trainers.replica.settings import ReplicaSettings


def device_of(settings: ReplicaSettings) -> torch.device:
    """The GPU that the config gives, where this process sees one; else the CPU."""
    return torch.device("cuda" if settings.use_gpu and torch.cuda.is_available() else "cpu")
