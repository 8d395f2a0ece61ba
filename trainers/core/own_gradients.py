"""Models that take gradients in their forward pass or their loss, called where nobody else needs gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from orchestray.platform.data.nested import map_tensors

if TYPE_CHECKING:
    from orchestray.platform.data.stream import MicroBatch
    from orchestray.trainers.core.forward import Forward

Result = TypeVar("Result")


def wants_gradients(error: RuntimeError) -> bool:
    """Return True for the error of what takes gradients while they are off."""
    return "does not require grad" in str(error)


class WithoutGradients:
    """Calls without gradients, except of what takes gradients itself (forces are minus the gradient of an energy).

    That shows at the first call, which is then made again.
    """

    def __init__(self) -> None:
        self._takes_own: bool | None = None
        """True if what is called takes gradients; None: that is not known yet."""

    def __call__(self, function: Callable[[Any], Result], given: Any) -> Result:
        """Return `function(given)`.

        Args:
            function: what is called.
            given: its argument, in which the first call may change copies of the tensors only.
        """
        if not self._takes_own:
            tried = given if self._takes_own is False else map_tensors(torch.clone, given)
            try:
                with torch.no_grad():
                    result = function(tried)
            except RuntimeError as error:
                if not wants_gradients(error):
                    raise
                self._takes_own = True
            else:
                self._takes_own = False
                return result
        with torch.enable_grad():
            return function(given)

    def metrics(self, forward: Forward, micro_batch: MicroBatch, *, step: int) -> dict[str, Any]:
        """Return `forward.metrics(micro_batch, step=step)`."""
        return self(lambda batch: forward.metrics(replace(micro_batch, batch=batch), step=step), micro_batch.batch)
