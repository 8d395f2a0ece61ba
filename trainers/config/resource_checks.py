"""Rules on the resources of the workers."""

from __future__ import annotations

from collections.abc import Iterator

from orchestray.platform.comm.backend import refuse_amount
from orchestray.platform.config.problems import Problem
from orchestray.trainers.config.checked_view import Rule, View

_GPUS = "resources.gpus_per_worker"


def _gpus(view: View) -> Iterator[Problem]:
    if refused := refuse_amount(view(_GPUS)):
        yield Problem(_GPUS, refused)


RESOURCE_RULES: tuple[Rule, ...] = (_gpus,)
