"""The device that a process computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestray.platform.process.gpu import current_gpu

if TYPE_CHECKING:
    from orchestray.trainers.config.settings import ReplicaSettings


def device_of(settings: ReplicaSettings) -> torch.device:
    """Return the GPU, with its index, if the config assigns one and this process sees it, else the CPU."""
    return current_gpu() if settings.use_gpu and torch.cuda.is_available() else torch.device("cpu")
