"""Groups that a worker has left open nothing that it would then wait for."""

from __future__ import annotations

import pytest

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from support.nccl import run_on_gpus


def test_a_channel_that_is_opened_after_the_groups_were_left_is_closed_at_once() -> None:
    def program(world: Collective) -> None:
        groups = Groups(Layout(pipeline=2), world)
        groups.abort()
        with pytest.raises(PeerLostError, match="were left while"):
            groups.channel(1 - world.rank, "late")

    run_on_gpus(2, program)
