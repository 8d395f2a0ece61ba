"""Elastic averaging: replicas tied to a centre."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.sync.local.elastic import ElasticAveraging
from support.layouts import LaidOut, layout_settings, train_and_keep, train_laid_out
from support.patience import PATIENCE_S
from support.threads import run_replicas
from support.training import few_digits, furthest, same_bits

KINDS: list[Any] = ["synchronous", "asynchronous"]


def task() -> Any:
    return few_digits()


def elastic(data: int, network: dict[str, Any] | None = None, **rest: Any) -> Any:
    exchange = {"type": "elastic_averaging", **rest.pop("exchange", {})}
    return layout_settings({"data": data, **(network or {})}, exchange, **rest)


class Vector(nn.Module):
    """A model that is one vector."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))


START = np.random.default_rng(0).normal(size=5)


def centre_of(model: Vector, exchange: ElasticAveraging) -> np.ndarray:
    with exchange.consensus():
        return model.values.detach().numpy().copy()


def moved(size: int, moves: np.ndarray, **elastic: Any) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Add `moves[step, replica]` from one start, and return replica and centre after each step."""

    def run(collective: Collective) -> list[tuple[np.ndarray, np.ndarray]]:
        model, exchange = Vector(START), ElasticAveraging(**elastic)
        exchange.attach(model, collective)
        seen = []
        for step, move in enumerate(moves, 1):
            exchange.before_step(step)
            exchange.finish([])
            with torch.no_grad():
                model.values.add_(torch.tensor(move[collective.rank]))
            exchange.after_step(step)
            collective.barrier()
            seen.append((model.values.detach().numpy().copy(), centre_of(model, exchange)))
            collective.barrier()
        exchange.detach()
        return seen

    return run_replicas(size, run)


def some_moves(steps: int, size: int) -> np.ndarray:
    return np.random.default_rng(steps).normal(size=(steps, size, len(START)))


# -- the equations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [None, 0.1])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_synchronous_steps_are_equations_5_and_6(size: int, alpha: float | None) -> None:
    moves = some_moves(6, size)
    found = moved(size, moves, alpha=alpha)
    rate = 0.9 / size if alpha is None else alpha
    x, centre = np.tile(START, (size, 1)), START
    for step, move in enumerate(moves):
        pulls = rate * (x - centre)
        x, centre = x + move - pulls, centre + pulls.sum(axis=0)
        for rank in range(size):
            np.testing.assert_allclose(found[rank][step][0], x[rank], rtol=0, atol=1e-12)
            np.testing.assert_allclose(found[rank][step][1], centre, rtol=0, atol=1e-12)
        assert all(np.array_equal(each[step][1], found[0][step][1]) for each in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_pull_keeps_the_sum_of_replicas_and_centre(size: int, kind: str) -> None:
    moves = some_moves(8, size)
    moves[1:] = 0.0
    found = moved(size, moves, every=2, consistency=kind)
    expected = size * START + moves[0].sum(axis=0) + START
    for step in range(8):
        whole = sum(each[step][0] for each in found) + found[0][step][1]
        np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-12)
    assert all(np.array_equal(found[0][step][0], found[0][step - 1][0]) for step in (2, 4, 6))
    assert not np.array_equal(found[0][1][1], found[0][0][1])
    spread = [np.ptp([each[step][0] for each in found], axis=0).max() for step in (0, 7)]
    assert spread[1] < 0.5 * spread[0]


def test_asynchronous_with_one_replica_is_algorithm_1() -> None:
    moves = some_moves(5, 1)
    [found] = moved(1, moves, alpha=0.3, consistency="asynchronous")
    x = centre = START
    for (mine, held), [move] in zip(found, moves, strict=True):
        pull = 0.3 * (x - centre)
        x, centre = x + move - pull, centre + pull
        np.testing.assert_allclose(mine, x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(held, centre, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_pull_the_replicas_are_on_their_own_bit_for_bit(kind: str) -> None:
    moves = some_moves(6, 3)
    found = moved(3, moves, alpha=0.0, consistency=kind)
    for rank, steps in enumerate(found):
        x = torch.tensor(START)
        for (mine, centre), move in zip(steps, moves, strict=True):
            x = x + torch.tensor(move[rank])
            assert np.array_equal(mine, x.numpy())
            assert np.array_equal(centre, START)


def test_an_asynchronous_pull_waits_for_no_other_replica() -> None:
    """Hold replica 2 back until the others have done twenty pulls."""
    others_done = threading.Event()
    waiting = threading.Barrier(2, action=others_done.set)

    def run(collective: Collective) -> int:
        model, exchange = Vector(START + collective.rank), ElasticAveraging(alpha=0.2, consistency="asynchronous")
        exchange.attach(model, collective)
        with exchange.consensus():
            pass
        if collective.rank == 2:
            assert others_done.wait(PATIENCE_S)
        for step in range(1, 21):
            exchange.before_step(step)
            exchange.after_step(step)
        if collective.rank != 2:
            waiting.wait(PATIENCE_S)
        collective.barrier()
        exchange.detach()
        return 20

    assert run_replicas(3, run) == [20, 20, 20]


def test_the_distance_from_the_centre_is_told_where_there_is_a_pull() -> None:
    def run(collective: Collective) -> list[dict[str, float]]:
        model, exchange = Vector(START), ElasticAveraging(every=3, alpha=0.25)
        exchange.attach(model, collective)
        said = []
        for step in range(1, 4):
            exchange.before_step(step)
            with torch.no_grad():
                model.values.add_(2.0)
            exchange.after_step(step)
            said.append(exchange.step_metrics)
        return said

    assert run_replicas(2, run)[0] == [{}, {}, {"disagreement": pytest.approx(4.0 * len(START) ** 0.5)}]


def test_a_pull_sends_one_all_reduce_of_the_model_or_one_message() -> None:
    def run(kind: Any) -> Callable[[Collective], int]:
        def sent(collective: Collective) -> int:
            exchange = ElasticAveraging(every=5, consistency=kind)
            exchange.attach(Vector(START), collective)
            for step in range(1, 16):
                exchange.before_step(step)
                exchange.after_step(step)
            collective.barrier()
            exchange.detach()
            return collective.own_bytes_sent + exchange.asked_bytes

        return sent

    num_bytes = START.nbytes
    assert run_replicas(2, run("synchronous")) == [3 * num_bytes] * 2
    # The centre answers each of two replicas three times.
    assert run_replicas(3, run("asynchronous")) == [0, 2 * 3 * num_bytes, 2 * 3 * num_bytes]


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [3])
def test_the_centre_is_what_is_validated_and_kept_and_it_learns(data: int, kind: str) -> None:
    chosen = {"steps": 40, "validate_every_steps": 40, "optimizer": {"type": "sgd", "lr": 0.2, "momentum": 0.9}}
    found = train_laid_out(
        task, elastic(data, {"microbatches": 1}, exchange={"consistency": kind, "every": 2}, **chosen)
    )
    model = task().build_model().double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = task().to_batch(task().dataset("validation"))

    def loss() -> float:
        with torch.no_grad():
            return float(task().loss(model(batch["inputs"].double()), batch))

    start = loss()
    model.load_state_dict(found.weights)
    validation = found.outcome.final["validation"]
    assert validation is not None
    assert validation["loss"] == pytest.approx(loss(), rel=1e-6)
    assert loss() < 0.9 * start
    assert furthest(before, found.weights) > 0.01


@pytest.mark.parametrize(
    ("kind", "network"),
    [("synchronous", {"tensor": 2}), ("synchronous", {"pipeline": 2}), ("asynchronous", {"tensor": 2})],
)
def test_replicas_in_parts_pull_like_whole_ones(network: dict[str, Any], kind: str) -> None:
    chosen = {"steps": 3, "exchange": {"consistency": kind}}
    whole, parts = (train_laid_out(task, elastic(2, layout, **chosen)) for layout in ({}, network))
    # Asynchronous pulls come in any order, which changes the centre in the second order of alpha.
    assert furthest(whole.weights, parts.weights) <= (1e-12 if kind == "synchronous" else 0.05)


def resumed(settings: Any, tmp_path: Path, *, first_steps: int, then: Any) -> LaidOut:
    train_laid_out(task, replace(settings, steps=first_steps), checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))

    def load() -> Loaded:
        found = latest_good(tmp_path)[0]
        assert found is not None
        assert found.step == first_steps
        return Loaded(found)

    return train_laid_out(task, then, load=load)


@pytest.mark.parametrize(
    ("data", "network", "first_steps"),
    [(3, {}, 3), (2, {"tensor": 2}, 2), (2, {"pipeline": 2}, 3)],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, data: int, network: dict[str, Any], first_steps: int
) -> None:
    settings = elastic(data, network, steps=5, exchange={"every": 2})
    whole, load = train_and_keep(task, settings, tmp_path, first_steps)
    again = train_laid_out(task, settings, load=load)
    assert same_bits(again.weights, whole.weights)
    assert again.losses == pytest.approx(whole.losses[first_steps:], rel=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("network", "exchange"), [({"data": 3}, None), ({}, {}), ({"data": 2}, {"type": "gossip"})])
def test_another_scheme_or_number_of_replicas_goes_on_from_the_centre(
    tmp_path: Path, network: dict[str, Any], exchange: dict[str, Any] | None, kind: str
) -> None:
    settings = elastic(2, steps=2, exchange={"consistency": kind})
    same = {"type": "elastic_averaging", "every": 2, "consistency": kind}
    then = layout_settings(network, same if exchange is None else exchange, steps=2)
    saved = train_laid_out(task, settings, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))
    found = latest_good(tmp_path)[0]
    assert found is not None
    again = train_laid_out(task, then, load=lambda: Loaded(found))
    assert again.losses == []
    assert same_bits(again.weights, saved.weights)


def test_the_centre_is_saved_once(tmp_path: Path) -> None:
    from safetensors import safe_open

    train_laid_out(task, elastic(3, steps=2), checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))
    [file] = tmp_path.glob("**/exchange.safetensors")
    with safe_open(str(file), "pt") as tensors:
        centres = [name for name in tensors.keys() if "centre." in name]  # noqa: SIM118 - no mapping
    assert len(centres) == len(task().build_model().state_dict())


# -- losing a peer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "lost"), [("synchronous", 2), ("asynchronous", 2), ("asynchronous", 0)])
def test_a_lost_peer_is_seen_as_a_lost_peer_by_all_who_need_it(kind: Any, lost: int) -> None:
    gone, finished = threading.Event(), threading.Barrier(2)

    def run(collective: Collective) -> str:
        exchange = ElasticAveraging(consistency=kind)
        exchange.attach(Vector(START), collective)
        try:
            for step in range(1, 20):
                if step == 5 and collective.rank == lost:
                    exchange.detach()
                    collective.abort()
                    gone.set()
                    return "left"
                if step == 6 or (step == 5 and kind == "asynchronous"):
                    assert gone.wait(PATIENCE_S)
                exchange.before_step(step)
                exchange.after_step(step)
            finished.wait(PATIENCE_S)
            exchange.detach()
        except PeerLostError:
            collective.abort()
            exchange.detach()
            return "lost"
        return "finished"

    unharmed = "finished" if kind == "asynchronous" and lost != 0 else "lost"
    assert run_replicas(3, run) == ["left" if rank == lost else unharmed for rank in range(3)]


def test_the_threads_that_serve_the_centre_end_with_the_exchange() -> None:
    def run(collective: Collective) -> None:
        exchange = ElasticAveraging(consistency="asynchronous")
        exchange.attach(Vector(START), collective)
        exchange.before_step(1)
        exchange.after_step(1)
        collective.barrier()
        collective.barrier()

    run_replicas(3, run)
    serving = [thread for thread in threading.enumerate() if thread.name == "orchestray-centre"]
    deadline_s = time.monotonic() + PATIENCE_S
    while (alive := [thread for thread in serving if thread.is_alive()]) and time.monotonic() < deadline_s:
        gc.collect()  # nothing, while another thread collects
        alive[0].join(0.1)
    assert not alive
