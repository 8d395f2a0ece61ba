"""Tests that share a Ray are given to one process, and one process is left for those that compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist")

from support.scheduling import SharedRaysThenFiles

SCOPES = {
    "tests/cluster/test_gang.py": "the shared Ray, tests/cluster",
    "tests/cluster/test_scale.py": "the shared Ray, tests/cluster",
    "tests/e2e/test_train.py": "the shared Ray, tests/e2e",
    "tests/e2e/test_submit.py": "the shared machines, tests/e2e",
    "tests/unit/test_english.py": "tests/unit/test_english.py",
    "tests/unit/test_imports.py": "tests/unit/test_imports.py",
    "tests/unit/test_docs.py": "tests/unit/test_docs.py",
}
NUM_TESTS = 3


class Process:
    """A process that runs what it is given, when it is asked to."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.given: list[int] = []

    def send_runtest_some(self, tests: list[int]) -> None:
        self.given += tests

    def shutdown(self) -> None:
        self.shutting_down = True

    def can_run(self) -> bool:
        """Return True as pytest-xdist's do: a test is run once the next one is known, or that there is none."""
        return bool(self.given) and (len(self.given) > 1 or self.shutting_down)


TESTS = [f"{file}::test_{number}" for file in SCOPES for number in range(NUM_TESTS)]


def scheduled(num_processes: int) -> tuple[SharedRaysThenFiles, list[Any]]:
    """Return a scheduler that has given out the first tests, and its processes."""
    config: Any = SimpleNamespace(
        getvalue=lambda _: ["popen"] * num_processes, option=SimpleNamespace(loadscopereorder=False)
    )
    scheduler = SharedRaysThenFiles(config)
    processes: list[Any] = [Process(f"gw{number}") for number in range(num_processes)]
    for process in processes:
        join(scheduler, process)
    scheduler.schedule()
    return scheduler, processes


def join(scheduler: SharedRaysThenFiles, process: Any) -> None:
    scheduler.add_node(process)
    scheduler.add_node_collection(process, TESTS)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_of_several_processes_one_has_no_ray_and_each_ray_is_in_one(num_processes: int) -> None:
    scheduler, processes = scheduled(num_processes)
    scopes: dict[str, list[Process]] = {}
    while any(process.given for process in processes):
        under_way = [SCOPES[TESTS[process.given[0]].partition("::")[0]] for process in processes if process.given]
        assert sum(scope.startswith("the shared") for scope in under_way) < num_processes
        for process in processes:
            if process.given:
                test = process.given.pop(0)
                scopes.setdefault(SCOPES[TESTS[test].partition("::")[0]], []).append(process)
                scheduler.mark_test_complete(process, test)
    assert {scope: len(set(of)) for scope, of in scopes.items()} == dict.fromkeys(SCOPES.values(), 1)
    assert sum(map(len, scopes.values())) == len(TESTS)


@pytest.mark.parametrize("ends", TESTS)
def test_the_others_run_what_is_left_once_after_a_test_that_ends_its_process(ends: str) -> None:
    scheduler, processes = scheduled(2)
    run: list[str] = []
    while able := [process for process in processes if process.can_run()]:
        for process in able:
            test = process.given.pop(0)
            run.append(TESTS[test])
            if TESTS[test] != ends:
                scheduler.mark_test_complete(process, test)
                continue
            assert scheduler.remove_node(process) == ends
            processes.remove(process)
            processes.append(Process("another"))
            join(scheduler, processes[-1])
            scheduler.schedule()
    assert sorted(run) == sorted(TESTS)
    assert not any(process.given for process in processes)
    assert scheduler.tests_finished
