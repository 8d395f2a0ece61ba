"""Random generators that draw alike in every process, while a task is built and says what its data are."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from orchestray.platform.process.gc_control import pause

if TYPE_CHECKING:
    from torch import Tensor

ALONE = threading.RLock()
"""Held by the thread that has seeded the process's generators, or will put them back."""


@contextlib.contextmanager
def drawing_alike() -> Iterator[None]:
    """Have the generators of Python, numpy and torch draw the same numbers inside, in any process; put them back after.

    A task that draws its validation data then draws the same rows on every worker, after a restart, and in a resumed
    run. A module that is not imported yet has no generator.
    """
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    with ALONE, contextlib.ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        random.seed(0)
        if numpy is not None:
            after.callback(numpy.random.set_state, numpy.random.get_state())
            numpy.random.seed(0)
        if torch is not None:
            after.callback(torch.set_rng_state, torch_state())
            torch.default_generator.manual_seed(0)
        yield


def torch_state() -> Tensor:
    """Return the state of torch's generator on CPUs.

    torch holds the generator's lock while it makes the tensor. A garbage collection that runs Python code there lets
    other threads run, and one that seeds would wait for that lock and hold the interpreter's: neither would go on.
    """
    import torch

    with pause():
        return torch.get_rng_state()
