"""The preparation of a process of Tune's trials."""

from __future__ import annotations

import contextlib
import logging
import os

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ORIGINAL_DIRECTORY = "TUNE_ORIG_WORKING_DIR"
"""Variable in which Tune keeps the directory that it has left for that of the trial."""


def prepare_process(num_threads: int) -> None:
    """Set torch's threads, and go back to the directory in which relative paths of the user's task are right.

    Args:
        num_threads: number of torch threads.
    """
    from orchestray.platform.actors.member import keep_freed_memory
    from orchestray.platform.process.working_directory import import_torch

    if (directory := os.environ.get(_ORIGINAL_DIRECTORY)) is not None:
        with contextlib.suppress(OSError):  # deleted meanwhile: then any directory will do
            os.chdir(directory)
    for name in ("ray.tune", "ray.train"):  # their notes are not output of the trial
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(num_threads)
    keep_freed_memory()
    import_torch()
    import torch

    torch.set_num_threads(num_threads)
