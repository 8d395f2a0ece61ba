"""Gangs that are kept warm between two runs of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.actors.gang import Gang, ignore
from orchestray.platform.actors.locality import homes
from orchestray.platform.actors.slot import Patience

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.platform.actors.placement import Shape
    from orchestray.platform.cluster.cluster import Cluster


def acquire(cluster: Cluster, shape: Shape, notify: Callable[[str], None] = ignore) -> Gang:
    """Return a gang of this shape: a parked one with warm processes if there is one, else a new one."""
    return acquire_all(cluster, [shape], notify)[0]


def acquire_all(cluster: Cluster, shapes: Sequence[Shape], notify: Callable[[str], None] = ignore) -> list[Gang]:
    """Return gangs that work together, one per shape; a gang placed beside another must come after it."""
    found: dict[int, Gang] = {}
    for gang in list(cluster.parked):
        cluster.parked.remove(gang)
        fitting = [index for index, shape in enumerate(shapes) if shape == gang.shape and index not in found]
        if fitting and gang.all_answer():
            found[fitting[0]] = gang
        else:
            gang.close()  # the new gangs may need its place
    try:
        for index, shape in enumerate(shapes):
            beside = next((i for i in range(index) if shape.beside and shapes[i].role == shape.beside), None)
            nodes = [] if beside is None else homes(found[beside].whereabouts(), shape.size)
            if index in found and found[index].wished != nodes:
                found.pop(index).close()
            if index not in found:
                found[index] = Gang(cluster, shape, notify, nodes=nodes)
    except BaseException:
        for gang in found.values():
            gang.close()
        raise
    return [found[index] for index in range(len(shapes))]


def release(gang: Gang) -> None:
    """Keep the gang warm for the next run of this process if we own its place; otherwise close it."""
    gang.while_waiting, gang.keep_stacks, gang.patience = ignore, ignore, Patience()  # of the run that has ended
    if (gang.cluster.owned or gang.cluster.room is not None) and gang.cluster.alive():
        gang.cluster.parked.append(gang)
    else:
        gang.close()


def make_room(cluster: Cluster) -> None:
    """Close the gangs that are kept warm for the next run, because something else needs their place."""
    while cluster.parked:
        cluster.parked.pop().close()
