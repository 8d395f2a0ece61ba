"""What a pipeline's worker does next, as plain data: schedules are lists of these, and nothing else."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Of an action. A backward pass is done in one, or its two halves apart (zero-bubble schedules)."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    """The gradient of the stage's input alone."""
    BACKWARD_WEIGHT = "W"
    """The gradients of the stage's weights, after its BACKWARD_INPUT."""


class Action(NamedTuple):
    """One micro-batch through one stage, one way. `str` gives torch's notation: `0F3` is stage 0, forward, batch 3."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Program = list[Action]
"""What one worker does in one step, in order."""
