"""Actions of a pipeline's worker as plain data; a schedule is nothing but lists of them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of an action. A backward pass runs as one action, or as two halves (zero-bubble schedules)."""

    FORWARD = "F"
    BACKWARD = "B"
    """Computes the gradients of the stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    """Computes the gradient of the stage's input alone."""
    BACKWARD_WEIGHT = "W"
    """Computes the gradients of the stage's weights, after its BACKWARD_INPUT."""

    __hash__ = str.__hash__  # that of Enum is a function in Python, and actions are keys


class Action(NamedTuple):
    """One pass of a micro-batch through a stage. `str` gives torch's notation: `0F3` is stage 0, forward, batch 3."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Program = list[Action]
"""Actions of one worker in one step, in order."""

_made: dict[tuple[int, Kind], list[Action]] = {}


def passes(stage: int, kind: Kind, num_micro_batches: int) -> list[Action]:
    """Return the actions of one kind at a stage, for each micro-batch.

    Programs share them: a planner makes millions of actions, of which most are alike.
    """
    known = _made.get((stage, kind), [])
    if len(known) < num_micro_batches:
        known = [*known, *(Action(stage, kind, each) for each in range(len(known), num_micro_batches))]
        _made[stage, kind] = known
    return known[:num_micro_batches]
