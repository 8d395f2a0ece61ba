"""A driver's account of the kills among a run's faults: each happens once, whatever is lost or resumed in between.

Imports nothing heavy: drivers do without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Fault = Mapping[str, Any]
"""kind, role, rank, at_step, and the fault's own keys."""


class Kills:
    """Which of the kills of a role's processes have happened.

    A loss is taken for the kill that was due if it is that kill's process that was lost; any other loss is none, and
    what was due stays due.
    """

    def __init__(self, faults: Iterable[Fault], role: str, *, is_alone: bool = False) -> None:
        """
        Args:
            faults: all of the run.
            role: of the processes.
            is_alone: each process is replaced by itself, so each has kills of its own; else all of the role meet again
                after every kill, and kills at one step happen at once.
        """
        self._due = [fault for fault in faults if fault["kind"] == "kill" and fault["role"] == role]
        self._is_alone = is_alone
        self._num_over: dict[int, int] = {}

    def num_over(self, rank: int = 0) -> int:
        """How many steps at which somebody is killed are over: what `FaultPlan.of` takes as its `attempt`.

        Args:
            rank: of the process, where each is replaced by itself; else it has no meaning.
        """
        return self._num_over.get(rank if self._is_alone else 0, 0)

    def lost(self, ranks: Collection[int]) -> list[Fault]:
        """Processes were lost; returns the kills that did it."""
        if self._is_alone:
            return [fault for rank in ranks for fault in self._lost_alone(rank)]
        due = _first(self._due)
        happened = [fault for fault in due if fault["rank"] in ranks]
        if happened:
            self._due = [fault for fault in self._due if fault not in due]
            self._num_over[0] = self.num_over() + 1
        return happened

    def _lost_alone(self, rank: int) -> list[Fault]:
        due = _first([fault for fault in self._due if fault["rank"] == rank])
        if due:
            self._due = [fault for fault in self._due if fault not in due]
            self._num_over[rank] = self.num_over(rank) + 1
        return due[:1]


def described(kill: Fault) -> dict[str, Any]:
    """What the event "fault" says of a kill that happened."""
    return {"kind": "kill", "role": kill["role"], "rank": kill["rank"], "at_step": kill["at_step"]}


def still_to_happen(
    faults: Sequence[dict[str, Any]], events: Iterable[Mapping[str, Any]], step: int
) -> tuple[dict[str, Any], ...]:
    """The faults of a run that goes on: without the kills that have happened, or whose step is past.

    Args:
        faults: of its config.
        events: lines of its `events.jsonl`.
        step: of the checkpoint it goes on from; 0: it starts again.
    """
    happened = {
        (event.get("role"), event.get("rank"), event.get("at_step"))
        for event in events
        if event.get("event") == "fault" and event.get("kind") == "kill"
    }
    return tuple(
        fault
        for fault in faults
        if fault["kind"] != "kill"
        or (fault["at_step"] > step and (fault["role"], fault["rank"], fault["at_step"]) not in happened)
    )


def _first(kills: Sequence[Fault]) -> list[Fault]:
    """Those of the earliest step."""
    step = min((fault["at_step"] for fault in kills), default=None)
    return [fault for fault in kills if fault["at_step"] == step]
