"""The GPUs of this process, as Ray has assigned them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from orchestray.platform.comm.backend import check_visible, device_index

if TYPE_CHECKING:
    import torch


def assigned_gpus() -> tuple[str, ...]:
    """Return the ids of the GPUs that Ray has assigned to this process; none in a driver and outside of Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ()
    return tuple(map(str, ray.get_gpu_ids()))


def own_gpu() -> torch.device:
    """Return the GPU on which this process computes, with its index.

    A device without an index is the current one of the calling thread. Other threads, such as the writer of
    checkpoints, may have another one.

    Raises:
        ClusterError: torch does not find the GPU.
    """
    import torch

    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    index = device_index(assigned_gpus(), visible)
    check_visible(index, torch.cuda.device_count(), torch.__version__)
    return torch.device("cuda", index)
