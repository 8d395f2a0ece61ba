"""The check that all workers of a run have the same data: each takes its share by the numbers of the rows alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.comm import objects
from orchestray.platform.data.mark import refuse_other_marks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.loop.replica import Replica


def refuse_other_data(replica: Replica) -> None:
    """Compare the data of all workers, each of which calls; members with task arguments of their own are not compared.

    Raises:
        TrainingError: two have other rows, or the same ones in another order.
    """
    if replica.world.size > 1 and not replica.settings.has_own_tasks:
        compare_data(replica.world, {split: replica.stream(split).mark() for split in ("train", "validation")})


def compare_data(world: Collective, marks: Mapping[str, list[int]]) -> None:
    """Compare the marks of the data of all workers of a group, by split.

    Raises:
        TrainingError: two have other rows, or the same ones in another order.
    """
    for rank, found in enumerate(every := objects.gather_json(world, dict(marks))):
        refuse_other_marks(rank, found, 0, every[0])
