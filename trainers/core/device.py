"""The device that a process computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestray.platform.actors.gpus import own_gpu

if TYPE_CHECKING:
    from orchestray.trainers.config.settings import ReplicaSettings


def device_of(settings: ReplicaSettings) -> torch.device:
    """Return this process's GPU, with its index, if the config assigns one, else the CPU.

    Raises:
        ClusterError: the config assigns a GPU, and torch does not find it.
    """
    return own_gpu() if settings.gpus else torch.device("cpu")
