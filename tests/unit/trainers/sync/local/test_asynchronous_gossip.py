"""Gossip without waiting: replicas that average with neighbours whatever those are doing."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.sync.local.asynchronous_gossip import AsynchronousGossip
from support.layouts import layout_settings, train_laid_out
from support.patience import PATIENCE_S
from support.threads import run_replicas
from support.training import few_digits, furthest

START = np.random.default_rng(0).normal(size=(4, 5))
"""Values of each replica."""
PATH = {"edges": [(0, 1), (1, 2), (2, 3)]}


class Vector(nn.Module):
    """A model that is one vector."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def now(self) -> np.ndarray:
        return self.values.detach().numpy().copy()


def test_replicas_on_a_ring_make_all_their_steps_while_one_computes_and_the_sum_changes_by_the_moves_alone() -> None:
    steps, others_done = 12, threading.Semaphore(0)
    moves = np.random.default_rng(1).normal(size=(steps, 4, 5))

    def run(collective: Collective) -> tuple[int, np.ndarray, np.ndarray, dict[str, Any], int]:
        rank, model, exchange = collective.rank, Vector(START[collective.rank]), AsynchronousGossip("ring", seed=3)
        exchange.attach(model, collective)
        done = 0
        for step in range(1, steps + 1 if rank else 2):
            exchange.before_step(step)
            exchange.finish([])
            if rank == 0:  # its only step lasts until all the others have made theirs
                done = sum(others_done.acquire(timeout=PATIENCE_S) for _ in range(3))
            with torch.no_grad():
                model.values.add_(torch.tensor(moves[step - 1, rank]))
            exchange.after_step(step)
        others_done.release()
        assert exchange.state() == {}
        settled, sent = model.now(), exchange.asked_bytes
        exchange.agree()
        summary = exchange.summary()
        collective.barrier()
        exchange.detach()
        return done, settled, model.now(), summary, sent

    found = run_replicas(4, run)
    assert found[0][0] == 3
    moved = START.sum(axis=0) + moves[0, 0] + moves[:, 1:].sum(axis=(0, 1))
    np.testing.assert_allclose(sum(settled for _, settled, *_ in found), moved, rtol=0, atol=1e-12)
    for _, _, agreed, summary, _ in found:
        np.testing.assert_allclose(agreed, moved / 4, rtol=0, atol=1e-12)
        assert (summary["graph"], summary["consistency"]) == ("ring", "asynchronous")
    begun = [summary["begun"] for *_, summary, _ in found]
    answered = [summary["answered"] for *_, summary, _ in found]
    assert begun == [1, steps, steps, steps]
    assert sum(answered) == sum(begun)
    assert answered[0] > 0, "neighbours have averaged with the one that computed"
    assert [sent for *_, sent in found] == [2 * 5 * 8 * number for number in begun], "its model, and half the distance"


@pytest.mark.parametrize("graph", ["random", PATH], ids=str)
def test_without_moves_replicas_come_to_the_mean(graph: Any) -> None:
    def run(collective: Collective) -> np.ndarray:
        model, exchange = Vector(START[collective.rank]), AsynchronousGossip(graph)
        exchange.attach(model, collective)
        for step in range(1, 81):
            exchange.before_step(step)
            exchange.after_step(step)
            collective.barrier()  # with all its steps before those of others, one would reach its neighbours alone
        exchange.state()
        settled = model.now()
        collective.barrier()
        exchange.detach()
        return settled

    # On the path, the slower of the two, a round of all four multiplies the disagreement by 0.85 at most in the mean.
    for settled in run_replicas(4, run):
        np.testing.assert_allclose(settled, START.mean(axis=0), rtol=0, atol=1e-3)


def second_eigenvalue(neighbours: list[list[int]]) -> float:
    """Return the second eigenvalue of the mean of W^T W, W a round in which each replica asks one neighbour in turn."""
    size, rounds = len(neighbours), []
    for asked in itertools.product(*neighbours):
        done = np.eye(size)
        for gap in np.eye(size) - np.eye(size)[list(asked)]:
            done = done - np.outer(gap, gap) / 2 @ done
        rounds.append(done.T @ done)
    return float(np.linalg.eigvalsh(np.mean(rounds, axis=0))[-2])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("graph", "neighbours"),
    [
        ("ring", [[1, 4], [0, 2], [1, 3], [2, 4], [3, 0]]),
        ({"edges": [(0, 1), (1, 2), (2, 3), (3, 4)]}, [[1], [0, 2], [1, 3], [2, 4], [3]]),
    ],
    ids=["ring", "path"],
)
def test_the_disagreement_without_moves_shrinks_at_the_rate_of_the_second_eigenvalue(
    graph: Any, neighbours: list[list[int]], seed: int
) -> None:
    """Have replicas take turns, so that the order of the exchanges is known. Their partners are drawn."""
    rounds, size = 20, len(neighbours)
    start = np.random.default_rng(size).normal(size=(size, 5))

    def run(collective: Collective) -> np.ndarray:
        model, exchange = Vector(start[collective.rank]), AsynchronousGossip(graph, seed=seed)
        exchange.attach(model, collective)
        exchange._known()  # all connect together
        for step in range(1, rounds + 1):
            for turn in range(size):
                if turn == collective.rank:
                    exchange.before_step(step)
                    exchange.after_step(step)
                collective.barrier()
        exchange.state()
        settled = model.now()
        collective.barrier()
        exchange.detach()
        return settled

    ended = np.stack(run_replicas(size, run))
    np.testing.assert_allclose(ended.mean(axis=0), start.mean(axis=0), rtol=0, atol=1e-12)
    ratio = np.linalg.norm(ended - ended.mean(axis=0)) / np.linalg.norm(start - start.mean(axis=0))
    assert 0.6 < ratio ** (1 / rounds) / second_eigenvalue(neighbours) ** 0.5 <= 1


def test_a_training_ends_with_one_model_that_has_learned_like_that_of_one_process() -> None:
    chosen: dict[str, Any] = {"steps": 8, "optimizer": {"type": "sgd", "lr": 0.1}}
    one = train_laid_out(few_digits, layout_settings(**chosen))
    exchange = {"type": "gossip", "graph": "ring", "consistency": "asynchronous"}
    found = train_laid_out(few_digits, layout_settings({"data": 3}, exchange, **chosen))
    moved = furthest(one.weights, train_laid_out(few_digits, layout_settings(**{**chosen, "steps": 1})).weights)
    assert furthest(found.weights, one.weights) < 0.5 * moved


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"exchange": {"mixing": "push_sum"}}, r"strategy\.exchange\.mixing"),
        ({"exchange": {"peers": 2}}, r"strategy\.exchange\.peers"),
        ({"exchange": {"consensus_step_size": 0.5}}, r"strategy\.exchange\.consensus_step_size"),
        ({"compression": {"type": "topk", "ratio": 0.1}, "exchange": {"graph": "ring"}}, r"strategy\.compression"),
        ({"network": {"data": 4, "tensor": 2}}, r"strategy\.network\.tensor"),
    ],
    ids=str,
)
def test_what_needs_replicas_in_step_is_refused(changes: dict[str, Any], path: str) -> None:
    exchange = {"type": "gossip", "consistency": "asynchronous", **changes.pop("exchange", {})}
    strategy = {"network": {"data": 4}, "exchange": exchange, **changes}
    train = {"batch_size": 16, "steps": 2, "optimizer": {"type": "sgd", "lr": 0.1}}
    with pytest.raises(ConfigError, match=path):
        load_train_config({"name": "free", "task": {"type": "digits"}, "train": train, "strategy": strategy})
