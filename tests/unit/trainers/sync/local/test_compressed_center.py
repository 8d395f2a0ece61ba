"""Elastic averaging whose pulls are sent in a code, and what elastic averaging sends beside the collective."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.sync.local.elastic import ElasticAveraging
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.threads import run_replicas
from support.training import digits, few_digits, furthest, same_bits

KINDS = ["synchronous", "asynchronous"]
CODES: list[dict[str, Any]] = [{"type": "qsgd", "bits": 4}, {"type": "onebit"}, {"type": "topk", "ratio": 0.1}]
LOSSLESS = {"type": "topk", "ratio": 1.0}
NONE = {"type": "none"}
START = np.random.default_rng(0).normal(size=80)


def name_of(code: Any) -> str:
    return str(code["type"]) if isinstance(code, dict) else str(code)


class Vector(nn.Module):
    """A model that is one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(START))


def pulled(size: int, steps: int, code: dict[str, Any], kind: Any) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """Move once, at the first step, then only pull: replicas and centre after every step, and bytes at the end."""
    moves = np.random.default_rng(size).normal(size=(size, len(START)))

    def run(collective: Collective) -> Any:
        model, exchange = Vector(), ElasticAveraging(consistency=kind, compression=code)
        exchange.attach(model, collective)
        rows, centres = [], []
        for step in range(1, steps + 1):
            exchange.before_step(step)
            exchange.finish([])
            with torch.no_grad():
                if step == 1:
                    model.values += torch.tensor(moves[collective.rank])
            exchange.after_step(step)
            collective.barrier()
            rows.append(model.values.detach().numpy().copy())
            if step in (1, steps):
                with exchange.consensus():
                    centres.append(model.values.detach().numpy().copy())
                collective.barrier()
        exchange.detach()  # a message counts once it is sent, which may be after its arrival
        told = collective.own_bytes_sent, exchange.asked_bytes, exchange.bytes_saved
        return np.stack(rows), np.stack(centres), told

    found = run_replicas(size, run)
    return np.stack([each[0] for each in found]), found[0][1], [each[2] for each in found]


@pytest.mark.parametrize("code", CODES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_a_coded_pull_keeps_the_sum_of_replicas_and_centre_and_brings_them_together(
    kind: str, code: dict[str, Any]
) -> None:
    size = 3
    rows, centres, _ = pulled(size, 40, code, kind)
    whole = (size + 1) * START + np.random.default_rng(size).normal(size=(size, len(START))).sum(axis=0)
    for step, centre in ((0, centres[0]), (-1, centres[1])):
        np.testing.assert_allclose(rows[:, step].sum(axis=0) + centre, whole, rtol=0, atol=1e-12)
    apart = [np.linalg.norm(rows[:, step] - rows[:, step].mean(axis=0)) for step in (0, -1)]
    assert apart[1] < 0.2 * apart[0]
    assert np.linalg.norm(rows[:, -1] - centres[1]) < 0.2 * np.linalg.norm(rows[:, 0] - centres[0])


def test_synchronous_pulls_in_a_code_that_loses_nothing_are_the_plain_ones() -> None:
    plain, coded = (pulled(3, 5, code, "synchronous") for code in (NONE, LOSSLESS))
    np.testing.assert_allclose(coded[0], plain[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(coded[1], plain[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_pulls_are_their_messages(kind: str) -> None:
    size, steps, message, dense = 3, 4, 8 + 80 // 8, 80 * 8
    means = 2 * (size - 1) * dense if kind == "asynchronous" else 0  # two looks at the centre, from the first replica
    _, _, told = pulled(size, steps, {"type": "onebit"}, kind)
    if kind == "synchronous":
        assert [sent for sent, _, _ in told] == [(size - 1) * message * steps] * size
        assert [saved for _, _, saved in told] == [
            steps * (-(-2 * (size - 1) * dense // size) - (size - 1) * message)
        ] * size
        return
    assert sum(sent for sent, _, _ in told) == means
    assert [asked for _, asked, _ in told] == [0, 2 * message * steps, 2 * message * steps]
    assert [saved for _, _, saved in told] == [0, *[2 * (dense - message) * steps] * 2]


# -- training ----------------------------------------------------------------------------------------------------------


def task() -> Any:
    return few_digits()


def elastic(data: int, code: dict[str, Any] = NONE, network: dict[str, Any] | None = None, **rest: Any) -> Any:
    exchange = {"type": "elastic_averaging", **rest.pop("exchange", {})}
    return replace(layout_settings({"data": data, **(network or {})}, exchange, **rest), compression=code)


def test_a_run_counts_what_asynchronous_pulls_send_both_ways() -> None:
    """Let two of three replicas pull at every step: as many values there and back; `every` changes nothing else."""
    size = sum(parameter.numel() for parameter in task().build_model().parameters()) * 8
    chosen: dict[str, Any] = {"steps": 8, "validate_every_steps": 8}
    often, seldom = (
        train_laid_out(task, elastic(3, exchange={"consistency": "asynchronous", "every": every}, **chosen)).outcome
        for every in (1, 8)
    )
    assert often.bytes_sent - seldom.bytes_sent == 2 * 2 * size * (8 - 1)
    assert seldom.bytes_sent >= 2 * 2 * size
    assert often.bytes_dense == often.bytes_sent


@pytest.mark.parametrize("code", CODES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_learn_from_coded_pulls_and_fewer_bytes(kind: str, code: dict[str, Any]) -> None:
    """Two plain pulls at 12 of 25 steps send the model 24 times, wherever the centre is and however they interleave.

    Beside them go two looks at a centre that is served, and what the ends of segments agree on.
    """

    def shallow() -> Any:
        return digits(hidden=[16])

    chosen: dict[str, Any] = {"steps": 25, "optimizer": {"type": "sgd", "lr": 0.3, "momentum": 0.9}}
    exchange = {"consistency": kind, "every": 2}
    found = train_laid_out(shallow, elastic(2, code, {"microbatches": 1}, exchange=exchange, **chosen))
    assert sum(found.losses[-5:]) < 0.8 * sum(found.losses[:5])
    size = sum(parameter.numel() for parameter in shallow().build_model().parameters()) * 8
    beside = 2 * size if kind == "asynchronous" else 0
    assert 0 <= found.outcome.bytes_dense - 24 * size - beside < 3000
    assert found.outcome.bytes_sent - beside < 0.5 * 24 * size


def test_without_loss_a_synchronous_run_is_the_plain_one() -> None:
    plain, found = (train_laid_out(task, elastic(2, code, steps=6)) for code in (NONE, LOSSLESS))
    assert furthest(found.weights, plain.weights) <= 1e-12


def resumed(settings: Any, tmp_path: Path, *, first_steps: int) -> LaidOut:
    train_laid_out(task, replace(settings, steps=first_steps), checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))

    def load() -> Loaded:
        found = latest_good(tmp_path)[0]
        assert found is not None
        return Loaded(found)

    return train_laid_out(task, settings, load=load)


@pytest.mark.parametrize("code", CODES, ids=name_of)
def test_a_resumed_synchronous_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, code: dict[str, Any]) -> None:
    settings = elastic(2, code, steps=5, exchange={"every": 2})
    whole = train_laid_out(task, settings)
    again = resumed(settings, tmp_path, first_steps=3)
    assert same_bits(again.weights, whole.weights)


def test_a_resumed_asynchronous_run_goes_on_learning(tmp_path: Path) -> None:
    settings = elastic(2, CODES[0], steps=20, exchange={"consistency": "asynchronous"})
    whole, again = train_laid_out(task, settings), resumed(settings, tmp_path, first_steps=10)
    assert len(again.losses) == 10
    assert sum(again.losses) < 1.3 * sum(whole.losses[10:])
