"""Gossip: replicas that mix with a few others after each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.sync.local.gossip import Gossip
from orchestray.trainers.sync.local.mixing import Mixer
from support.layouts import LaidOut, layout_settings, train_and_keep, train_laid_out
from support.threads import run_replicas
from support.training import few_digits, furthest, same_bits

PATH = {"edges": [(0, 1), (1, 2), (2, 3)]}
STAR = {"edges": [(0, 1), (0, 2), (0, 3)]}
KINDS = ["symmetric", "push_sum"]


def task() -> Any:
    return few_digits()


def gossiping(data: int, network: dict[str, Any] | None = None, **rest: Any) -> Any:
    exchange = {"type": "gossip", **rest.pop("exchange", {})}
    return layout_settings({"data": data, **(network or {})}, exchange, **rest)


class Vector(nn.Module):
    """A model that is one vector."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))


def mixed(start: np.ndarray, steps: int, visit: Callable[[Gossip, int], Any] | None = None, **gossip: Any) -> list[Any]:
    """Mix only, from row i of `start` at replica i.

    Return each replica's rows after every step, and the results of `visit`; without it the bytes sent in every step.
    """

    def run(collective: Collective) -> Any:
        model, exchange = Vector(start[collective.rank]), Gossip(**gossip)
        exchange.attach(model, collective)
        rows, said, sent = [], [], []
        for step in range(1, steps + 1):
            before = collective.own_bytes_sent
            exchange.before_step(step)
            exchange.finish([])
            exchange.after_step(step)
            sent.append(collective.own_bytes_sent - before)
            rows.append(model.values.detach().numpy().copy())
            if visit is not None:
                said.append(visit(exchange, step))
        exchange.detach()
        return np.stack(rows), sent if visit is None else said

    return run_replicas(len(start), run)


def some(size: int, width: int = 7) -> np.ndarray:
    return np.random.default_rng(size).normal(size=(size, width))


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "momentum", "mixing"),
    [(2, 0.0, "symmetric"), (2, 0.9, "push_sum"), (4, 0.0, "push_sum"), (4, 0.9, "symmetric")],
)
def test_a_complete_graph_is_the_single_process(data: int, momentum: float, mixing: str) -> None:
    chosen = {"optimizer": {"type": "sgd", "lr": 0.1, "momentum": momentum}, "steps": 3}
    one = train_laid_out(task, layout_settings(**chosen))
    found = train_laid_out(task, gossiping(data, exchange={"graph": "complete", "mixing": mixing}, **chosen))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


@pytest.mark.parametrize("network", [{"tensor": 2}, {"pipeline": 2}])
def test_a_complete_graph_is_the_single_process_however_a_replica_is_laid_out(network: dict[str, Any]) -> None:
    one = train_laid_out(task, layout_settings(steps=2))
    found = train_laid_out(task, gossiping(2, network, steps=2, exchange={"graph": "complete"}))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


def test_one_replica_alone_stays_as_it_is() -> None:
    for mixing in KINDS:
        [(rows, sent)] = mixed(some(1), 3, graph="ring", mixing=mixing)
        assert np.array_equal(rows, np.tile(some(1), (3, 1)))
        assert sent == [0, 0, 0]


def test_one_step_moves_the_mean_as_a_single_process_would_whoever_mixes() -> None:
    one = train_laid_out(task, layout_settings(steps=1))
    for exchange in ({"peers": 2}, {"graph": "ring"}, {"graph": STAR, "mixing": "push_sum"}, {"mixing": "push_sum"}):
        found = train_laid_out(task, gossiping(4, steps=1, exchange=exchange))
        assert furthest(found.weights, one.weights) <= 1e-12


# -- mixing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["random", "ring", PATH, STAR], ids=str)
def test_symmetric_mixing_is_its_matrix_and_keeps_the_mean(graph: Any) -> None:
    start = some(4)
    rows = np.stack([each for each, _ in mixed(start, 12, graph=graph, seed=5)])
    mixer, expected = Mixer(4, graph, seed=5), start
    for step in range(1, 13):
        expected = mixer.matrix(step) @ expected
        np.testing.assert_allclose(rows[:, step - 1], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(rows[:, step - 1].mean(axis=0), start.mean(axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("graph", ["random", "ring", PATH, STAR], ids=str)
def test_push_sum_keeps_the_weighted_mean_and_comes_to_it_on_a_graph_with_unequal_degrees(graph: Any) -> None:
    start = some(4)
    found = mixed(
        start,
        60,
        lambda exchange, _: [float(held.tensor) for held in exchange.state().values()],
        graph=graph,
        mixing="push_sum",
    )
    rows = np.stack([each for each, _ in found])
    weights = np.array(found[0][1])
    assert all(said == found[0][1] for _, said in found)
    for step in range(60):
        held = (weights[step][:, None] * rows[:, step]).sum(axis=0)
        np.testing.assert_allclose(held, start.sum(axis=0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(rows[:, -1], np.tile(start.mean(axis=0), (4, 1)), rtol=0, atol=1e-4)
    uneven = graph in (PATH, STAR)
    assert (np.abs(weights - 1).max() > 0.2) == uneven


def test_a_step_of_push_sum_counts_once_whatever_the_weight() -> None:
    """Compare with Assran et al. 2019, algorithm 1, by hand: x <- P (x - lr g), w <- P w, z = x / w."""
    start, steps = some(4), 8
    moves = np.random.default_rng(1).normal(size=(steps, *start.shape))

    def run(collective: Collective) -> np.ndarray:
        model, exchange = Vector(start[collective.rank]), Gossip(graph=STAR, mixing="push_sum")
        exchange.attach(model, collective)
        for step in range(1, steps + 1):
            exchange.before_step(step)
            exchange.finish([])
            with torch.no_grad():
                model.values.add_(torch.tensor(moves[step - 1, collective.rank]))
            exchange.after_step(step)
        exchange.agree()
        return model.values.detach().numpy().copy()

    matrix, x = Mixer(4, STAR, kind="push_sum").matrix(1), start
    for move in moves:
        x = matrix @ (x + move)
    ends = run_replicas(4, run)
    np.testing.assert_allclose(ends[0], x.mean(axis=0), rtol=0, atol=1e-12)
    assert all(np.array_equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize(("graph", "size"), [("ring", 5), ("ring", 4), ("complete", 3), (PATH, 4), (STAR, 4)], ids=str)
def test_disagreement_shrinks_by_the_second_eigenvalue(graph: Any, size: int) -> None:
    matrix = Mixer(size, graph).matrix(1)
    values, vectors = np.linalg.eigh(matrix)
    order = np.argsort(-np.abs(values))
    second = vectors[:, order[1]]
    start = 3.0 + np.outer(second, np.arange(1.0, 6.0))
    rows = np.stack([each for each, _ in mixed(start, 5, graph=graph)])
    before = np.linalg.norm(start - start.mean(axis=0))
    for step in range(5):
        after = np.linalg.norm(rows[:, step] - rows[:, step].mean(axis=0))
        assert after == pytest.approx(abs(values[order[1]]) * before, rel=0, abs=1e-12)
        before = after


@pytest.mark.parametrize(
    ("graph", "peers", "degrees"),
    [("ring", 1, [2, 2, 2, 2]), ("complete", 1, [3, 3, 3, 3]), (STAR, 1, [3, 1, 1, 1]), ("random", 2, [2, 2, 2, 2])],
    ids=str,
)
def test_a_replica_sends_a_message_a_step_to_each_neighbour_and_nothing_else(
    graph: Any, peers: int, degrees: list[int]
) -> None:
    found = mixed(some(4), 3, graph=graph, peers=peers)
    for (_, sent), degree in zip(found, degrees, strict=True):
        assert sent == [degree * 7 * 8] * 3


def test_of_three_replicas_one_rests_each_step() -> None:
    found = mixed(some(3), 9)
    for at_step in zip(*(sent for _, sent in found), strict=True):
        assert sorted(at_step) == [0, 56, 56]


def test_the_disagreement_that_is_told_is_the_distance_from_the_mean() -> None:
    start = some(4)
    found = mixed(start, 11, lambda exchange, _: exchange.step_metrics, graph="complete")
    told = [said[0]["disagreement"] for _, said in found]
    true = ((start - start.mean(axis=0)) ** 2).sum() / 4
    assert np.mean(np.square(told)) == pytest.approx(true, rel=0, abs=1e-12)
    assert all([step for step, line in enumerate(said, 1) if line] == [1, 11] for _, said in found)
    [pair, _] = mixed(start[:2], 1, lambda exchange, _: exchange.step_metrics)
    assert pair[1][0]["disagreement"] == pytest.approx(np.linalg.norm(start[0] - start[1]) / 2)


@pytest.mark.parametrize("mixing", KINDS)
def test_at_the_end_all_take_the_mean_the_same_bits_everywhere_and_validation_changes_nothing(mixing: str) -> None:
    start = some(4)

    def run(collective: Collective) -> tuple[Tensor, Tensor, bool]:
        model, exchange = Vector(start[collective.rank]), Gossip(graph=STAR, mixing=mixing)  # type: ignore[arg-type]
        exchange.attach(model, collective)
        for step in (1, 2, 3):
            exchange.before_step(step)
            exchange.after_step(step)
        before = model.values.detach().clone()
        with exchange.consensus():
            agreed = model.values.detach().clone()
        kept = torch.equal(model.values, before)
        exchange.agree()
        return agreed, model.values.detach().clone(), kept

    found = run_replicas(4, run)
    for agreed, end, kept in found:
        assert torch.equal(agreed, found[0][0])
        assert torch.equal(end, agreed)
        assert kept
        np.testing.assert_allclose(end, start.mean(axis=0), rtol=0, atol=1e-12)


def test_a_float32_parameter_beside_a_float64_one_is_mixed_in_its_own_precision() -> None:
    def run(collective: Collective) -> tuple[Tensor, Tensor, Tensor]:
        model = nn.Module()
        model.a = nn.Parameter(torch.full((2, 3), float(collective.rank)))
        model.b = nn.Parameter(torch.full((4,), 2.0 * collective.rank, dtype=torch.float64))
        model.register_buffer("count", torch.tensor(collective.rank))
        exchange = Gossip(graph="complete")
        exchange.attach(model, collective)
        exchange.before_step(1)
        exchange.after_step(1)
        return model.a.detach(), model.b.detach(), model.count  # type: ignore[return-value]

    for rank, (a, b, count) in enumerate(run_replicas(2, run)):
        assert torch.equal(a, torch.full((2, 3), 0.5))
        assert torch.equal(b, torch.ones(4, dtype=torch.float64))
        assert int(count) == rank


# -- resuming, losing a peer -------------------------------------------------------------------------------------------


def resumed(settings: Any, tmp_path: Path, *, first_steps: int, then: Any) -> LaidOut:
    train_laid_out(task, replace(settings, steps=first_steps), checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))

    def load() -> Loaded:
        found = latest_good(tmp_path)[0]
        assert found is not None
        assert found.step == first_steps
        return Loaded(found)

    return train_laid_out(task, then, load=load)


@pytest.mark.parametrize(
    ("data", "network", "exchange"),
    [
        (3, {}, {}),
        (4, {}, {"graph": STAR, "mixing": "push_sum"}),
        (2, {"tensor": 2}, {"mixing": "push_sum"}),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, data: int, network: dict[str, Any], exchange: dict[str, Any]
) -> None:
    settings = gossiping(data, network, steps=5, exchange=exchange)
    whole, load = train_and_keep(task, settings, tmp_path, 3)
    again = train_laid_out(task, settings, load=load)
    assert same_bits(again.weights, whole.weights)
    # The loss is a sum over the replicas, whose order depends on where in its segment a step is.
    assert again.losses == pytest.approx(whole.losses[3:], rel=1e-14)


@pytest.mark.parametrize(
    ("network", "exchange"),
    [({"data": 3}, {"type": "gossip"}), ({}, {}), ({"data": 4}, {"type": "averaging", "every": 2})],
)
def test_another_scheme_or_number_of_replicas_goes_on_from_the_mean(
    tmp_path: Path, network: dict[str, Any], exchange: dict[str, Any]
) -> None:
    settings = gossiping(4, steps=2, exchange={"graph": STAR, "mixing": "push_sum"})
    again = resumed(settings, tmp_path, first_steps=2, then=layout_settings(network, exchange, steps=2))
    whole = train_laid_out(task, settings)
    assert again.losses == []
    assert furthest(again.weights, whole.weights) <= 1e-15


@pytest.mark.parametrize("graph", ["ring", "random"])
def test_a_lost_peer_is_seen_by_all_as_a_lost_peer(graph: Any) -> None:
    def run(collective: Collective) -> str:
        model, exchange = Vector(some(4)[collective.rank]), Gossip(graph=graph)
        exchange.attach(model, collective)
        try:
            for step in range(1, 200):
                if step == 3 and collective.rank == 2:
                    collective.abort()
                    return "left"
                exchange.before_step(step)
                exchange.after_step(step)
        except PeerLostError:
            collective.abort()
            return "lost"
        return "finished"

    assert run_replicas(4, run) == ["lost", "lost", "left", "lost"]


def test_the_result_tells_how_many_steps_a_rumour_takes_on_this_graph() -> None:
    def told(**gossip: Any) -> dict[str, Any]:
        def run(collective: Collective) -> dict[str, Any]:
            exchange = Gossip(**gossip)
            exchange.attach(Vector(np.zeros(1)), collective)
            return exchange.summary()

        found = run_replicas(4, run)
        assert all(each == found[0] for each in found)
        return found[0]

    ring = told(graph="ring")
    assert ring["dissemination_steps"] == 2
    assert ring["expected_dissemination_steps"] == pytest.approx(1.639 * 2)
    assert ring["messages_per_step"] == 2
    assert ring["contraction"] == pytest.approx(1 / 3)
    random = told()
    assert 2 <= random["dissemination_steps"] <= 8
    assert random["messages_per_step"] == 1
    assert told(graph="complete")["dissemination_steps"] == 1
