"""Rules on the resources of the workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestray.platform.comm.backend import refuse_amount
from orchestray.platform.config.problems import Problem
from orchestray.trainers.config.checked_view import Rule, View

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import Resources

_GPUS = "resources.gpus_per_worker"


def _gpus(view: View) -> Iterator[Problem]:
    if refused := refuse_amount(view(_GPUS)):
        yield Problem(_GPUS, refused)


def unused_gpus(resources: Resources) -> str | None:
    """Return a warning if workers reserve GPUs that they do not compute on; None: they do not.

    It is not refused: a task of the user's may compute on the others by itself.
    """
    gpus = resources.gpus_per_worker
    if gpus <= 1:
        return None
    return (
        f"{_GPUS} is {gpus:g}: a worker computes on the first of its GPUs, and only reserves the others. To compute on "
        "all of them, set it to 1 and ask for more workers (strategy.network)."
    )


RESOURCE_RULES: tuple[Rule, ...] = (_gpus,)
