"""A search that loses a whole machine goes on with the others: no trial is lost, none is written down twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Self

import pytest

from support.cli import Running, python_path, read_lines
from support.machines import NUM_CPUS, Machines
from support.placed_task import FIRST_HELD, HELD_AT

_TRIALS = list(range(4))  # two that end first, and two that are held
_STEPS = 2 * HELD_AT
_TESTS = Path(__file__).parents[1]


def config(
    folder: Path, hold: Path, *, workers: int, cpus: int, parallel: int, task: str = "PlacedTask", steps: int = _STEPS
) -> dict[str, Any]:
    train = {"batch_size": 8, "steps": steps, "optimizer": {"type": "sgd", "lr": 0.1}}
    section = {"type": f"support.placed_task:{task}", "trial": 0, "folder": str(folder), "hold": str(hold)}
    return {
        "name": "lost",
        "base": {
            "task": section,
            "train": train,
            "strategy": {"network": {"data": workers}},
            "resources": {"cpus_per_worker": cpus},
        },
        "search": {
            "method": {"type": "grid"},
            "objective": {"metric": "accuracy"},
            "space": {"task.trial": {"type": "choice", "values": _TRIALS}},
            "parallel": parallel,
        },
    }


def held(folder: Path) -> set[str]:
    """Return the machines on which a trial is held."""
    places = [place for place in folder.iterdir() if int(place.name.partition("-")[0]) >= FIRST_HELD]
    told = [place.read_text(encoding="utf-8").split() for place in places]
    return {line[0] for line in told if len(line) == 2 and int(line[1]) == HELD_AT}


class Held:
    """A search on a cluster, whose trials are held; `go_on` lets them go."""

    def __init__(self, machines: Machines, tmp_path: Path, **options: Any) -> None:
        self._steps = options.get("steps", _STEPS)
        self.folder, self.hold, self.path = tmp_path / "places", tmp_path / "hold", tmp_path / "runs" / "lost"
        self.folder.mkdir()
        self.hold.touch()
        file = tmp_path / "lost.yaml"
        file.write_text(json.dumps(config(self.folder, self.hold, **options)), encoding="utf-8")
        arguments = ["search", file, "--runs-dir", tmp_path / "runs", "--quiet", "--address", machines.gcs_address]
        self.running = Running(arguments, self.path, env={**machines.token, "PYTHONPATH": python_path(_TESTS)})

    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "trials.jsonl")

    def until_held_on(self, num_machines: int) -> None:
        self.running.until(
            f"a trial held on {num_machines} machine(s), and one that has ended",
            lambda: len(held(self.folder)) == num_machines and self.lines(),
        )

    def go_on(self) -> None:
        """Let the trials go on to their end: every one is done, and once."""
        self.hold.unlink()
        status, _, stderr = self.running.finish()
        assert status == 0, stderr
        lines = self.lines()
        assert sorted(line["config"]["task.trial"] for line in lines) == _TRIALS
        assert {(line["status"], line["steps"]) for line in lines} == {("succeeded", self._steps)}
        assert (self.path / "best" / "model").is_dir()

    def processes(self) -> list[int]:
        """Return the numbers of processes that each trial has been in, the fewest first."""
        return sorted(Counter(place.name.partition("-")[0] for place in self.folder.iterdir()).values())

    def places(self, trial: int) -> dict[int, tuple[str, int]]:
        """Return machine and number of steps of each process that a trial has been in, by its id."""
        told = {
            int(place.name.partition("-")[2]): place.read_text().split() for place in self.folder.glob(f"{trial}-*")
        }
        return {pid: (line[0], int(line[1])) for pid, line in told.items() if len(line) == 2}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.process.kill()


@pytest.mark.slow
def test_a_search_goes_on_when_the_machine_of_a_trial_is_gone(machines: Machines, tmp_path: Path) -> None:
    with Held(machines, tmp_path, workers=1, cpus=NUM_CPUS, parallel=2) as search:
        search.until_held_on(2)
        ended = search.lines()
        machines.kill_last_node()
        search.go_on()
    assert search.lines()[: len(ended)] == ended
    assert search.processes()[-2:] == [1, 2], "the trial of the lost machine alone began again"


@pytest.mark.slow
def test_a_search_goes_on_when_a_machine_with_one_worker_of_a_trial_is_gone_and_another_comes(
    machines: Machines, tmp_path: Path
) -> None:
    with Held(machines, tmp_path, workers=2, cpus=NUM_CPUS, parallel=1) as search:
        search.until_held_on(2)
        ended = search.lines()
        machines.kill_last_node()
        machines.repair()
        search.go_on()
    assert search.lines()[: len(ended)] == ended


@pytest.mark.slow
def test_the_trial_of_a_machine_that_is_announced_to_leave_goes_on_elsewhere_and_does_no_step_again(
    machines: Machines, tmp_path: Path
) -> None:
    machines.add_node(num_cpus=NUM_CPUS)  # one machine is free
    steps = 100
    options = {"workers": 1, "cpus": NUM_CPUS, "parallel": 2, "task": "UnhurriedTask", "steps": steps}
    with Held(machines, tmp_path, **options) as search:
        search.running.until("two trials under way", lambda: search.places(0) and search.places(1))
        at = {trial: node for trial in (0, 1) for node, _ in search.places(trial).values()}
        moved = next(trial for trial in (0, 1) if at[trial] != machines.head)
        machines.drain(at[moved])
        search.running.until("it has moved", lambda: len(search.places(moved)) == 2)
        search.go_on()
        done = dict(search.places(moved).values())
    machines.kill_drained()
    assert len(done.keys() - at.values()) == 1, "it went on where none was"
    assert sum(done.values()) == steps
    assert [len(search.places(trial)) for trial in (0, 1)].count(1) == 1, "the other stayed where it was"
