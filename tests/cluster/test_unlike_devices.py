"""One batch divided over two actors of unlike speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.trainers.survey.lab.dividing import unlike_devices

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster


def test_two_actors_of_unlike_speed_answer_a_batch_in_parts_by_speed_in_order_also_if_one_changes_or_dies(
    cluster: Cluster,
) -> None:
    exhibit = unlike_devices(rounds=3, rates=(1600.0, 400.0), samples=160)
    rows: list[list[Any]] = [list(row) for row in exhibit.rows]
    assert all(row[1] + row[2] == 160 for row in rows)
    assert all(row[4] < 1e-12 for row in rows)
    first, second, halves, by_speed, *changed, killed = rows
    assert [first[1:3], second[1:3], halves[1:3]] == [[160, 0], [0, 160], [80, 80]]
    assert abs(by_speed[1] - 160 * 4 / 5) < 160 / 10
    assert by_speed[3] < halves[3] < second[3]
    assert abs(changed[0][1] - 160 * 4 / 5) < 160 / 10  # nobody has seen it yet
    assert abs(changed[-1][1] - 160 / 3) < 160 / 10  # eight times slower it is half as fast as the second
    assert killed[1:3] == [0, 160]
    assert (
        exhibit.findings[4] == "Its process was killed with a part of a batch; the second answered 160 of 160 samples."
    )
    assert cluster.alive()
