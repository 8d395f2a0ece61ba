"""Shares that a worker gives up because another one, which computes them too, was faster.

Backup workers repeat what the slowest compute (Chen et al., "Revisiting distributed synchronous SGD", 2016, section 3);
the slower copy is cancelled once the faster one is done (tied requests: Dean and Barroso, "The tail at scale", 2013).
"""

from __future__ import annotations

import time
from concurrent.futures import wait
from typing import TYPE_CHECKING

from torch import nn

from orchestray.platform.errors import OrchestrayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.trainers.ps.protocol.messages import Asked


class ShareTakenError(OrchestrayError):
    """Raised in a pass over a share whose gradient another worker has just had applied."""


class Watch:
    """A question to the lead whether another worker has finished a share.

    The lead answers when that happens, or when this worker sends another request. So looking for the answer takes no
    message, and the lead needs no connection of its own to the worker.
    """

    def __init__(self, asked: Asked) -> None:
        """
        Args:
            asked: the request, the last one to the lead.
        """
        self._asked = asked

    def check(self) -> None:
        """Raise ShareTakenError if another worker has finished the share; never wait."""
        asked = self._asked
        if asked.answer is None and asked.done():
            asked.link.finish_first()  # also reaches the server that replaces a lost lead, which is asked again
        if asked.answer is not None and asked.answer.is_taken:
            raise ShareTakenError("Another worker has finished this share.")

    def sleep(self, seconds: float) -> None:
        """Sleep, but raise ShareTakenError as soon as `check` would."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if self._asked.answer is None and self._asked.header is not None:
                wait([self._asked.header.future], left_s)
            else:
                time.sleep(left_s)
            self.check()


def check_in_passes(model: nn.Module, check: Callable[[], None]) -> None:
    """Have a model call `check` before each module's forward pass, and after the gradient of each parameter."""
    for module in model.modules():
        module.register_forward_pre_hook(lambda _module, _inputs: check())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: check())  # type: ignore[no-untyped-call]
