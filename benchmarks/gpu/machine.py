"""Processes that have a CUDA context, as the driver knows them."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from gpu.check import Skip


def processes_on_gpus() -> set[int]:
    """Return the ids of processes with a CUDA context.

    Raises:
        Skip: this machine has no nvidia-smi, or it does not see them, as in some containers.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise Skip("it needs nvidia-smi, which is not here")
    command = [tool, "--query-compute-apps=pid", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise Skip(f"nvidia-smi does not list processes here: {done.stderr.strip() or done.stdout.strip()}")
    return {int(line) for line in done.stdout.split() if line.isdigit()}


def lists_processes(device: Any) -> bool:
    """Return True if nvidia-smi lists processes here: in many containers it ends well, and its list is empty.

    This process gets a CUDA context by it, which must be on the list.

    Raises:
        Skip: see `processes_on_gpus`.
    """
    import torch

    torch.zeros(1, device=device)
    return bool(processes_on_gpus())
