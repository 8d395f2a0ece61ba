"""Whatever talks through a collective, under NCCL's rules: nothing waits for ever, in whatever order things happen."""

from __future__ import annotations

import pytest
import torch

from orchestray.platform.comm.collective import Collective
from orchestray.platform.sim.event_loop import DeadlockError
from support.nccl import run_on_gpus

ONE_BY_ONE = pytest.mark.xfail(
    raises=DeadlockError, strict=True, reason="an exchange posts its receives one by one, and then its sends"
)


def swap(collective: Collective) -> float:
    """Swap numbers with the next rank of a pair."""
    peer = collective.rank ^ 1
    got = torch.zeros(1)
    collective.start_exchange({peer: torch.tensor([float(collective.rank)])}, {peer: got}).wait()
    return float(got)


def turn(collective: Collective) -> list[float]:
    """Pass a number around the ring, to the end."""
    rank, size = collective.rank, collective.size
    held, seen = torch.tensor([float(rank)]), []
    for _ in range(size):
        got = torch.zeros(1)
        collective.start_exchange({(rank + 1) % size: held}, {(rank - 1) % size: got}).wait()
        held = got
        seen.append(float(held))
    return seen


@ONE_BY_ONE
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_that_send_each_other_a_tensor_get_it(seed: int, *, eager: bool) -> None:
    assert run_on_gpus(4, swap, seed=seed, eager=eager)[0] == [1.0, 0.0, 3.0, 2.0]


@ONE_BY_ONE
@pytest.mark.parametrize("seed", range(5))
def test_ranks_in_a_ring_get_what_each_has_sent(seed: int) -> None:
    found = run_on_gpus(3, turn, seed=seed)[0]
    assert found == [[2.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 2.0]]
