"""Training by map and reduce tasks of Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.trainers.survey.lab.map_reduce import map_reduce

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster


def test_a_step_of_map_and_reduce_is_that_of_one_process_also_if_a_task_is_killed_and_executed_again(
    cluster: Cluster,
) -> None:
    exhibit = map_reduce(maps=5, steps=3, killed=(1, 3))
    assert [list(row[:4]) for row in exhibit.rows] == [[1, 5, 4, 5], [2, 5, 4, 6], [3, 5, 4, 5]]
    assert all(row[4] < 1e-12 for row in exhibit.rows)  # type: ignore[operator]  # they are numbers
    assert exhibit.findings[0] == "The process of one of 15 map tasks was killed; Ray executed 1 of them again."
    assert cluster.alive()
