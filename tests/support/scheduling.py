"""The order in which several processes run the tests (`pytest -n 3 --dist loadgroup`)."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

_ROOT = Path(__file__).parents[2]
_SHARED = {
    "the shared Ray": re.compile(r"\bcluster: Cluster\b|usefixtures\(.*\"cluster\""),
    "the shared machines": re.compile(r"\bmachines: Machines\b"),
}
"""Patterns of a file whose tests use a fixture that costs a start of Ray."""


class SharedRaysThenFiles(LoadScopeScheduling):
    """A scheduler that hands out the files of a folder that share a Ray first, to one process; then file by file.

    What a file sets up is set up once, and what can share a Ray starts no other. Tests with a Ray wait for its
    processes much of the time: all processes but one have such, and that one computes meanwhile.

    Nobody but the processes that run the tests knows their fixtures: the files' text says it. The marks of `--dist
    loadgroup` would do, but pytest-xdist 3.8 writes them into an attribute that pytest 9.2 no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        shared = shared_by(file)
        return f"{shared}, {Path(file).parent}" if shared else file

    def _assign_work_unit(self, node: Any) -> None:
        with_ray = {each for each, units in self.assigned_work.items() if _waits_for_ray(units)}
        takes_ray = node in with_ray or len(with_ray) < max(1, self.numnodes - 1)
        fitting = next((scope for scope in self.workqueue if _has_ray(scope) == takes_ray), None)
        if fitting is not None:
            self.workqueue.move_to_end(fitting, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        """Give the process more to do: it runs a test once it knows the next one, or that there is none."""
        if node not in self.registered_collections:  # a new one that has not collected its tests yet
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Give what a process leaves to others, and return the test that ended it; None: it had nothing to do.

        pytest-xdist 3.8 would give out again all that the process was ever given, and wait for ever at the end: a
        process that has one test left would be given a file that is done. It would run that test once more, too.
        """
        left = {scope: tests for scope, tests in self.assigned_work.pop(node).items() if not all(tests.values())}
        if not left:
            return None
        first = next(iter(left.values()))
        ended_by = next(test for test, is_done in first.items() if not is_done)
        first[ended_by] = True
        self.workqueue.update({scope: tests for scope, tests in left.items() if not all(tests.values())})
        for other in self.nodes:
            self._reschedule(other)
        return ended_by


def _has_ray(scope: str) -> bool:
    return scope.startswith(tuple(_SHARED))


def _waits_for_ray(units: dict[str, dict[str, bool]]) -> bool:
    """Return True if a test with a Ray is left of what a process has been given."""
    return any(_has_ray(scope) and not all(done.values()) for scope, done in units.items())


@functools.cache
def shared_by(file: str) -> str | None:
    """Return what the tests of this file, a path from the root, share with those of other files; None: nothing."""
    text = (_ROOT / file).read_text(encoding="utf-8")
    return next((name for name, pattern in _SHARED.items() if pattern.search(text)), None)
