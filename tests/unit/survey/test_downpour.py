"""Group D: Downpour SGD, as Dean et al., "Large Scale Distributed Deep Networks" (2012), algorithm 1, has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from orchestray.trainers.ps.worker.client import ShardClient
from support.central_run import central_settings, train_central, train_with_a_lost_worker
from support.training import digits

SHARES = 24


def task() -> Any:
    return digits(hidden=[24])


def rhythm(push_every: int, fetch_every: int, directory: Path) -> tuple[list[str], Any]:
    """Return what one worker does in a short run, in order, and its report.

    `f` fetches, a number pushes that many shares.
    """
    log: list[str] = []
    pull, start_push = ShardClient.pull, ShardClient.start_push

    def pulled(client: ShardClient, *args: Any, **keys: Any) -> Any:
        log.append("f")
        return pull(client, *args, **keys)

    def pushed(client: ShardClient, orders: Any, *args: Any, **keys: Any) -> Any:
        log.append(str(len(orders)))
        return start_push(client, orders, *args, **keys)

    exchange = {"consistency": "asynchronous", "push_every": push_every, "fetch_every": fetch_every}
    with mock.patch.object(ShardClient, "pull", pulled), mock.patch.object(ShardClient, "start_push", pushed):
        found = train_central(
            task, central_settings(1, exchange, steps=SHARES, optimizer={"type": "sgd", "lr": 0.1}), directory
        )
    return log, found.workers[0]["reports"]["PushesLater"]


@pytest.mark.parametrize(("push_every", "fetch_every"), [(2, 3), (3, 2), (4, 4), (1, 6), (6, 1)])
def test_downpour_keeps_the_rhythms_of_its_pushes_and_fetches(
    push_every: int, fetch_every: int, tmp_path: Path
) -> None:
    log, report = rhythm(push_every, fetch_every, tmp_path)
    pushes = [int(did) for did in log if did != "f"]
    assert pushes == [push_every] * (SHARES // push_every)
    done, fetched_at = 0, []
    for did in log:
        if did == "f":
            fetched_at.append(done)
        else:
            done += int(did)
    # A fetch after share k is seen between the pushes that end at or before k and at or after it. Around the validation
    # at the end everybody fetches.
    due = [share // push_every * push_every for share in range(0, SHARES, fetch_every)]
    assert fetched_at[: len(due)] == due
    assert set(fetched_at[len(due) :]) <= {SHARES}
    assert report == [{"shares_a_push": push_every, "shares_a_fetch": fetch_every}]


def test_downpour_replicas_with_adagrad_reach_the_target_of_the_single_process(tmp_path: Path) -> None:
    exchange = {"consistency": "asynchronous", "push_every": 2, "fetch_every": 2, "shards": 2}
    adagrad = {"type": "adagrad", "lr": 0.04}
    settings = central_settings(3, exchange, steps=None, epochs=4, batch_size=96, optimizer=adagrad)
    found = train_central(task, settings, tmp_path)
    assert found.outcome.samples == 4 * len(task().dataset("train"))
    assert found.lines[-1]["accuracy"] > 0.85
    assert all(worker["shares"] > 0 for worker in found.workers)


def test_a_lost_downpour_replica_does_not_stop_the_others(tmp_path: Path) -> None:
    exchange = {"consistency": "asynchronous", "push_every": 2, "fetch_every": 2}
    settings = central_settings(2, exchange, steps=200, optimizer={"type": "sgd", "lr": 0.1})
    found = train_with_a_lost_worker(task, settings, tmp_path, after_lines=5, lines_alone=60)
    assert [line["step"] for line in found.lines if "split" not in line] == list(range(1, 201))
    assert found.outcome.ended == "finished"
