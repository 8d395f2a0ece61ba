"""Controllers and servers that talk over channels come to what shards inside the method come to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from orchestray.search.methods.base import Proposal
from orchestray.search.methods.controllers.hosts import ControllerHost, ServerHost
from orchestray.search.methods.controllers.reinforce import Controller, Reinforce
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.choices import Decision
from orchestray.trainers.ps.protocol.address import Address
from support.central_run import HOST
from support.replayed import replay
from support.toy_choices import Cells, cell_score

torch.set_num_threads(1)


@contextlib.contextmanager
def served(method: Reinforce) -> Iterator[list[ServerHost]]:
    """Have the controllers of a method push to servers over channels, from the state that it has."""
    state, layout = method.server.state(), method.server.layout
    servers = [ServerHost() for _ in range(layout.num_shards)]
    ports = [server.begin(rank, HOST, state, method.server.learning_rate) for rank, server in enumerate(servers)]
    hosts = [ControllerHost(*method.of_controllers) for _ in method.replicas]
    for replica, host in zip(method.replicas, hosts, strict=True):
        name = f"controller-{replica.index}-1"
        for server in servers:
            server.accept(replica.index, name)
        addresses = [Address(HOST, port, name) for port in ports]
        host.connect(replica.index, layout, addresses, replica.versions, replica.learned)

    def learn(
        replica: Controller, sequences: Sequence[Sequence[Decision]], advantages: Sequence[float]
    ) -> tuple[Sequence[int], Sequence[int], Mapping[str, Tensor]]:
        names = replica.policy.vocabulary.names
        lesson = hosts[replica.index].learn(names, sequences, advantages, replica.updates + 1)
        return lesson.staleness, lesson.versions, layout.joined(lesson.parts)

    try:
        method.work_with(learn)
        yield servers
    finally:
        for host in (*hosts, *servers):
            host.close()


@pytest.mark.parametrize(("controllers", "shards", "begins_at"), [(1, 1, 0.0), (1, 3, 0.5), (3, 2, 0.0), (3, 2, 0.5)])
def test_controllers_at_servers_propose_what_they_propose_in_one_process(
    controllers: int, shards: int, begins_at: float
) -> None:
    def made() -> Reinforce:
        sizes = {"controllers": controllers, "shards": shards, "children": 3, "hidden": 8, "learning_rate": 0.05}
        return Reinforce(space={}, architecture=Cells(3), seed=4, trials=45, **sizes)

    def score(proposal: Proposal, _step: int) -> float:
        return cell_score(proposal.genome)

    alone, again = made(), made()
    calls = simulate(alone, score, workers=5).calls
    begins = int(begins_at * len(calls))
    replay(again, calls[:begins])
    before = sum(replica.updates for replica in again.replicas)
    with served(again) as servers:
        replay(again, calls[begins:])
        found = [server.snapshot() for server in servers]
        moved = [server.usage()["bytes"] for server in servers]
    assert again.staleness == alone.staleness
    assert [version for version, _ in found] == alone.server.versions == [len(alone.staleness)] * shards
    values = [machine.shard.values for machine in alone.server.machines]
    assert all(torch.equal(state["values"], own) for (_, state), own in zip(found, values, strict=True))
    pushes = len(alone.staleness) - before
    assert pushes > 3
    for own, num_bytes in zip(values, moved, strict=True):
        # A gradient in, and what was learned out; the last answers may be counted after they have arrived.
        assert (2 * pushes - controllers) * own.nbytes <= num_bytes <= 2 * pushes * own.nbytes
    assert (max(alone.staleness) > 0) == (controllers > 1)
