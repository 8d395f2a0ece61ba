"""A driver's record of the kills among a run's faults: each happens once, whatever is lost or resumed in between.

Imports nothing heavy: drivers do without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Fault = Mapping[str, Any]
"""Has the keys kind, role, rank and at_step, and those of its kind."""


class KillSchedule:
    """A record of which kills of a role's processes have happened.

    A loss counts as the kill that was due if it is a loss of that kill's process. Any other loss is not a kill, and
    what was due stays due.
    """

    def __init__(self, faults: Iterable[Fault], role: str, *, is_alone: bool = False) -> None:
        """
        Args:
            faults: all faults of the run.
            role: role of the processes.
            is_alone: True if each process is replaced individually and has kills of its own. False if all of the role
                meet again after every kill; kills at one step then happen together.
        """
        self._due = [fault for fault in faults if fault["kind"] == "kill" and fault["role"] == role]
        self._is_alone = is_alone
        self._num_over: dict[int, int] = {}

    def num_over(self, rank: int = 0) -> int:
        """Return the number of past steps at which a process was killed, the `attempt` of `FaultPlan.of`.

        Args:
            rank: rank of the process, if each is replaced individually; otherwise unused.
        """
        return self._num_over.get(rank if self._is_alone else 0, 0)

    def lost(self, ranks: Collection[int]) -> list[Fault]:
        """Record that processes were lost; return the kills that caused it."""
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
    """Return the values of the event "fault" for a kill that happened."""
    return {"kind": "kill", "role": kill["role"], "rank": kill["rank"], "at_step": kill["at_step"]}


def still_to_happen(
    faults: Sequence[dict[str, Any]], events: Iterable[Mapping[str, Any]], step: int
) -> tuple[dict[str, Any], ...]:
    """Return the faults of a run that continues, without the kills that have happened or whose step is past.

    Args:
        faults: faults of its config.
        events: lines of its `events.jsonl`.
        step: step of the checkpoint that it continues from; 0: it starts again.
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
    """Return the kills of the earliest step."""
    step = min((fault["at_step"] for fault in kills), default=None)
    return [fault for fault in kills if fault["at_step"] == step]
