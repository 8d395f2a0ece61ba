"""Numbers on messages in the metric lines of a run under servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.comm.channel import thread_pair
from orchestray.trainers.ps.protocol.requests import Traffic
from orchestray.trainers.ps.server.events import TrafficCounter
from support.central import Plan, Servers, Worker
from support.central_run import central_settings, train_central
from support.training import few_digits

SGD = {"type": "sgd", "lr": 0.1}


def task() -> Any:
    return few_digits()


def num_parameters() -> int:
    return sum(parameter.numel() for parameter in task().build_model().parameters())


@pytest.mark.parametrize(
    "exchange",
    [
        {},
        {"consistency": "asynchronous"},
        {"consistency": "asynchronous", "shards": 2, "overlap": True},
        {"groups": 2},
        {"groups": 2, "shards": 2, "consistency": "asynchronous"},
    ],
    ids=str,
)
def test_lines_tell_of_the_bytes_of_each_step(exchange: dict[str, Any], tmp_path: Path) -> None:
    settings = central_settings(2, exchange, steps=6, optimizer=SGD)
    found = train_central(task, settings, tmp_path)
    lines = [line for line in found.lines if "split" not in line]
    sent = [line["bytes_sent"] for line in lines]
    each_way = 2 * 8 * num_parameters()  # of a step, by two workers, in float64
    assert len(sent) == 6
    assert all(number >= 0 for number in sent)
    # A step is two pushes and one or two fetches; with leaf servers the same goes on to the shards and back at most.
    levels = 2 if exchange.get("groups") else 1
    assert 1.4 * each_way * 6 < sum(sent) < levels * 2 * each_way * 8 + 6 * 20_000
    assert sum(sent) <= sum(found.moved)


def test_a_step_of_one_worker_moves_its_gradient_and_the_parameters(tmp_path: Path) -> None:
    found = train_central(task, central_settings(1, steps=10, optimizer=SGD), tmp_path)
    sent = [line["bytes_sent"] for line in found.lines if "split" not in line]
    size = 8 * num_parameters()
    assert sent[0] >= 2 * size  # fetched once, pushed once
    for number in sent[1:]:
        assert 2 * size <= number <= 2 * size + 4000


@pytest.mark.parametrize("exchange", [{}, {"shards": 2}, {"groups": 2}, {"consistency": "asynchronous"}], ids=str)
def test_lines_tell_what_compressed_gradients_still_lack(exchange: dict[str, Any], tmp_path: Path) -> None:
    settings = central_settings(2, exchange, steps=6, optimizer=SGD, precision="float32")
    settings = replace(settings, compression={"type": "onebit", "error_feedback": True})
    found = train_central(task, settings, tmp_path)
    errors = [line.get("compression_error") for line in found.lines if "split" not in line]
    assert all(error is not None and error > 0 for error in errors[1:])


def test_lines_of_a_compression_without_a_residual_tell_of_none(tmp_path: Path) -> None:
    settings = central_settings(2, steps=2, optimizer=SGD, precision="float32")
    plain = train_central(task, replace(settings, compression={"type": "qsgd"}), tmp_path)
    assert not any("compression_error" in line for line in plain.lines)


def test_the_error_is_the_norm_of_what_the_worker_keeps() -> None:
    plan = Plan(shards=2, compression={"type": "topk", "ratio": 0.05, "error_feedback": True})
    servers = Servers(plan)
    worker = Worker(plan, 0, servers.channels(0))
    worker.run()
    kept = torch.cat([compressor.state()["residual"] for compressor in worker.client.encoder.compressors or ()])
    assert servers.servers[0]._tally.take().errors == ((0, pytest.approx(float(kept.norm()), rel=1e-12)),)
    worker.client.close()
    servers.close()


def test_a_tally_counts_each_byte_once_and_forgets_nothing_of_channels_that_end() -> None:
    ours, theirs = thread_pair("one", "other")
    tally = TrafficCounter()
    tally.open(theirs)
    ours.isend([torch.zeros(100)]).wait()
    theirs.irecv().wait()
    first = tally.take().bytes
    assert first >= 400
    assert tally.take().bytes == 0
    ours.isend([torch.zeros(50)]).wait()
    theirs.irecv().wait()
    tally.end(theirs)
    tally.end(theirs)
    tally.add(Traffic(bytes=7, saved=3, errors=((1, 0.5), (0, 0.25)), warnings=("it is late",)))
    second = tally.take()
    assert second.saved == 3
    assert 207 <= second.bytes < first
    assert second.errors == ((0, 0.25), (1, 0.5))
    assert second.warnings == ("it is late",)
    tally.forget(0)
    assert tally.take() == Traffic(errors=((1, 0.5),))
    ours.close()
    theirs.close()


@pytest.mark.parametrize("exchange", [{}, {"shards": 2}], ids=str)
def test_a_checkpoint_knows_the_bytes_of_the_steps_before_it(exchange: dict[str, Any], tmp_path: Path) -> None:
    settings = central_settings(2, exchange, steps=6, optimizer=SGD, precision="float32")
    settings = replace(
        settings,
        compression={"type": "onebit", "error_feedback": True},
        checkpoint_every_steps=6,
        checkpoint_storage=str(tmp_path / "checkpoints"),
    )
    first = train_central(task, settings, tmp_path / "first")
    again = train_central(task, replace(settings, steps=9), tmp_path / "again")
    sent = sum(line["bytes_sent"] for line in first.lines if "split" not in line)
    assert again.outcome.bytes_sent == sent > 0
    gradients = 2 * 6 * 4 * num_parameters()  # two workers, six steps, float32; one bit of each value is sent
    assert 0.9 * gradients < again.outcome.bytes_dense - again.outcome.bytes_sent < gradients
