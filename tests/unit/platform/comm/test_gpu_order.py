"""Whatever talks through a collective, under NCCL's rules: nothing waits for ever, in whatever order things happen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.process_groups import start_together
from support.nccl import GpuCollective, run_on_gpus


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


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_that_send_each_other_a_tensor_get_it(seed: int, *, eager: bool) -> None:
    assert run_on_gpus(4, swap, seed=seed, eager=eager)[0] == [1.0, 0.0, 3.0, 2.0]


@pytest.mark.parametrize("seed", range(5))
def test_ranks_in_a_ring_get_what_each_has_sent(seed: int) -> None:
    found = run_on_gpus(3, turn, seed=seed)[0]
    assert found == [[2.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 2.0]]


def test_torch_has_the_calls_that_make_several_sends_and_receives_one_operation() -> None:
    """Torch's own `batch_isend_irecv` makes the same, with groups of its registry only."""
    cpu = torch.device("cpu")
    group = dist.ProcessGroup(dist.HashStore(), 0, 2)
    fake = torch._C._distributed_c10d.FakeProcessGroup._create_internal(0, 2)
    group._register_backend(cpu, dist.ProcessGroup.BackendType.CUSTOM, fake)
    assert not group._get_backend(cpu).supports_coalescing
    group._start_coalescing(cpu)
    group.recv([torch.zeros(1)], 1, 0)
    group.send([torch.zeros(1)], 1, 0)
    assert group._end_coalescing(cpu).wait()
    assert isinstance(start_together(group, [(1, torch.zeros(1))], []), list)


class LeftMeanwhile(GpuCollective):
    """A collective that its member leaves while it connects another group."""

    def _connect_relative(self, path: str, ranks: list[int]) -> Collective:
        made = super()._connect_relative(path, ranks)
        self.abort()
        return made


def test_a_group_that_is_connected_after_the_drivers_word_is_left_at_once() -> None:
    def program(collective: Collective) -> bool:
        assert isinstance(collective, GpuCollective)
        late = LeftMeanwhile(collective.gpus, range(2), collective.rank, path="late")
        with pytest.raises(PeerLostError):
            late.sibling("beside")
        return all(member.is_left for member in late._family)

    assert run_on_gpus(2, program)[0] == [True, True]
