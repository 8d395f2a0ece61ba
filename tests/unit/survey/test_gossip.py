"""Group D: replicas that talk to a few others, and rumours among them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.collective import Collective
from orchestray.trainers.exchange.dissemination import corrected_gossip, expected_rounds, push_gossip
from orchestray.trainers.exchange.gossip import Gossip
from support.threads import run_replicas
from support.training import Trained, digits, train

SIZES = [8, 16, 32, 64, 128, 256, 512, 1024]


# -- Gossip SGD --------------------------------------------------------------------------------------------------------


def test_gossip_reaches_nearly_all_of_8_to_1024_nodes_in_1_639_log2_m_rounds() -> None:
    fractions = []
    for nodes in SIZES:
        rounds = math.ceil(expected_rounds(nodes))
        spread = push_gossip(nodes, rounds, max(20, 8000 // nodes), np.random.default_rng(nodes))
        fractions.append(spread.informed_fraction)
    # As found: 93 % of 8, 99.9 % of 1024; all of them in one trial of two to three.
    assert min(fractions) > 0.9
    assert fractions[-1] > 0.998
    assert np.polyfit(np.log2(SIZES), np.log2(1 - np.array(fractions)), 1)[0] < -0.5


def gossiped(data: int, steps: int = 48, **train_keys: Any) -> list[Trained]:
    exchange = {"type": "gossip"} if data > 1 else {}
    optimizer = {"type": "sgd", "lr": 0.1}
    return train(digits(), data, exchange=exchange, steps=steps, optimizer=optimizer, precision="float32", **train_keys)


def vector(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in state.values()])


@pytest.mark.parametrize("data", [2, 4, 8])
def test_gossip_sgd_replicas_stay_near_each_other_and_their_mean_learns_like_one_process(data: int) -> None:
    [one] = gossiped(1)
    replicas = gossiped(data)
    ends = torch.stack([vector(replica.after) for replica in replicas])
    start = vector(replicas[0].before)
    mean = ends.mean(0)
    consensus_error = (ends - mean).square().sum(1).mean().sqrt()
    assert (consensus_error > 0) == (data > 2)  # two make a complete graph
    assert consensus_error < 0.35 * (mean - start).norm()
    assert (mean - vector(one.after)).norm() < 0.2 * (vector(one.after) - start).norm()


def test_gossip_sgd_sends_as_much_a_replica_however_many_there_are() -> None:
    def sent(size: int) -> list[int]:
        def run(collective: Collective) -> int:
            exchange = Gossip(peers=1, seed=1)
            exchange.attach(nn.Linear(10, 10), collective)
            for step in range(1, 5):
                exchange.before_step(step)
                exchange.after_step(step)
            return exchange.bytes_sent_total

        return run_replicas(size, run)

    assert [sent(size) for size in (2, 4, 8)] == [[4 * 110 * 4] * size for size in (2, 4, 8)]


# -- Fixed-graph neighbour exchange ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 5, 6])
def test_fixed_graph_exchange_on_a_ring_forgets_differences_at_the_rate_of_its_second_eigenvalue(size: int) -> None:
    """1/3 + 2/3 cos(2 pi / P), by the eigenvalues of circulant matrices; two messages a step, for every P."""
    starts, steps = np.random.default_rng(size).normal(size=(size, 4)), 24

    def run(collective: Collective) -> tuple[list[np.ndarray], int]:
        model = nn.Linear(3, 1).double()
        with torch.no_grad():
            model.weight.copy_(torch.tensor(starts[collective.rank, :3]))
            model.bias.fill_(starts[collective.rank, 3])
        exchange = Gossip(graph="ring")
        exchange.attach(model, collective)
        rows = []
        for step in range(1, steps + 1):
            exchange.before_step(step)
            exchange.after_step(step)
            rows.append(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy())
        return rows, exchange.bytes_sent_total

    found = run_replicas(size, run)
    rows = np.stack([each for each, _ in found])
    distance = np.linalg.norm(rows - rows.mean(axis=0), axis=(0, 2))
    second = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / size)
    assert distance[-1] / distance[-2] == pytest.approx(second, rel=1e-4)
    assert [sent for _, sent in found] == [steps * 2 * 4 * 8] * size


# -- Deterministic correction protocols --------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [8, 64, 1024])
@pytest.mark.parametrize("failures", [0, 1, 5])
def test_deterministic_correction_reaches_everybody_in_each_of_1000_trials(nodes: int, failures: int) -> None:
    rounds = round(math.log2(nodes))  # too few for gossip alone
    found = corrected_gossip(
        nodes,
        rounds,
        1000,
        np.random.default_rng(nodes + failures),
        num_failures=failures,
        tolerated_failures=failures,
    )
    assert (found.after_gossip < nodes - failures).mean() > 0.5
    assert found.missed.tolist() == [0] * 1000
