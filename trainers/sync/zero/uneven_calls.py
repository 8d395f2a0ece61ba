"""Collective operations among members that may reach different ones: those that wait serve the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from orchestray.platform.comm.collective import Collective

Result = TypeVar("Result")
_RESTING = 0


class Turns:
    """A protocol by which all members take part in one operation at a time, even if their programs have reached
    different ones.

    Before every operation each member sends, in 8 bytes, which one it wants; that of the lowest rank that wants any is
    next. A member that wanted another one serves this one first, adding nothing of its own, and asks again. So replicas
    may run different numbers of passes, and different parts of a model, without waiting for each other forever.
    """

    def __init__(self, collective: Collective, serve: Callable[[int], None]) -> None:
        """
        Args:
            collective: the members.
            serve: takes part in the operation of that code on behalf of the others.
        """
        self._collective = collective
        self._serve = serve

    def take(self, code: int, perform: Callable[[], Result]) -> Result:
        """Perform the operation `code` (from 1) with all members, after those that come before it."""
        while (chosen := self._next(code)) != code:
            self._serve(chosen)
        return perform()

    def rest(self) -> None:
        """Serve until every member rests."""
        while (chosen := self._next(_RESTING)) != _RESTING:
            self._serve(chosen)

    def _next(self, wanted: int) -> int:
        codes = self._collective.all_gather(torch.tensor([wanted], dtype=torch.int64))
        return next((code for code in codes.flatten().tolist() if code != _RESTING), _RESTING)
