"""Gradients of all replicas, combined by a rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.aggregation.base import make_aggregation
from orchestray.trainers.sync.factory import make_exchange
from orchestray.trainers.sync.robust.gathered import Gathered
from support.layouts import layout_settings, train_laid_out
from support.lockstep import SHAPES, exchange_by_hand, gradient, same_everywhere
from support.threads import run_replicas
from support.training import few_digits, furthest


def task() -> Any:
    return few_digits()


def gathered(kind: str, **arguments: Any) -> Gathered:
    return Gathered(make_aggregation(kind, **arguments))


@pytest.mark.parametrize("network", [{"data": 5}, {"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2}])
def test_the_mean_of_gathered_gradients_is_what_an_all_reduce_gives(
    monkeypatch: pytest.MonkeyPatch, network: dict[str, Any]
) -> None:
    """Use a last batch of an epoch with fewer samples than workers; their shares differ in size."""
    chosen = {"steps": 5, "batch_size": 356}
    plain = train_laid_out(task, layout_settings(network, **chosen))
    monkeypatch.setattr("orchestray.trainers.loop.replica.make_exchange", lambda **_: gathered("mean"))
    found = train_laid_out(task, layout_settings(network, **chosen))
    assert found.losses == pytest.approx(plain.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, plain.weights) <= 1e-12


@pytest.mark.parametrize("kind", ["krum", "multi_krum", "median", "trimmed_mean"])
def test_every_replica_gets_what_the_rule_makes_of_all_gradients(kind: str) -> None:
    size = 5
    rule = make_aggregation(kind, byzantine=1)
    seen = exchange_by_hand(lambda: Gathered(rule, bucket_mb=1e-3), size, 2)
    assert same_everywhere(seen)
    for step in (1, 2):
        # The replicas weigh their losses, so each one's mean gradient is what it has over its weight.
        rows = torch.stack([torch.cat([g.reshape(-1) for g in gradient(rank, step)]) * size for rank in range(size)])
        wanted = rule(rows, torch.ones(size))
        got = torch.cat([g.reshape(-1) for g in seen[0].gradients[step - 1] if g is not None])
        assert float((got - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max())


def test_each_replica_sends_its_gradient_to_each_other() -> None:
    size, elements = 4, sum(torch.Size(shape).numel() for shape in SHAPES)
    seen = exchange_by_hand(lambda: gathered("median"), size, 1)
    small = -(-2 * (size - 1) * 8 * (len(SHAPES) + 8 * size) // size)
    assert seen[0].bytes_sent[0] == small + (size - 1) * 8 * (elements + 1)


@pytest.mark.parametrize("code", [{"type": "float16"}, {"type": "qsgd", "bits": 8}, {"type": "qsgd", "huffman": True}])
def test_gathered_gradients_may_be_coded(code: dict[str, Any]) -> None:
    def make() -> Any:
        return make_exchange(compression=code, aggregation={"type": "median", "byzantine": 1}, seed=1)

    coded, plain = exchange_by_hand(make, 3, 1), exchange_by_hand(lambda: gathered("median", byzantine=1), 3, 1)
    assert same_everywhere(coded)
    assert coded[0].bytes_sent[0] < plain[0].bytes_sent[0] / 2
    for found, wanted in zip(coded[0].gradients[0], plain[0].gradients[0], strict=True):
        assert found is not None
        assert wanted is not None
        assert float((found - wanted).norm()) < 0.5 * float(wanted.norm())


def test_a_replica_without_samples_takes_no_part() -> None:
    def run(collective: Any) -> Tensor:
        model = torch.nn.Linear(3, 1, bias=False).double()
        exchange = gathered("median")
        exchange.attach(model, collective)
        exchange.before_step(1)
        idle = collective.rank == 3
        exchange.fraction = 0.0 if idle else 0.25
        if not idle:
            model.weight.grad = torch.full_like(model.weight, 0.25 * (collective.rank + 1))
        exchange.finish([])
        (found,) = exchange.gradients()
        assert found is not None
        return found

    for found in run_replicas(4, run):
        assert found.tolist() == [[2.0, 2.0, 2.0]]  # of 1, 2 and 3; with a zero it would be 1.5


def test_too_few_workers_with_samples_are_refused_with_a_sentence() -> None:
    settings = replace(
        layout_settings({"data": 5, "microbatches": 1}, steps=1, batch_size=4),
        aggregation={"type": "krum", "byzantine": 1},
    )
    with pytest.raises(TrainingError, match=r"Only 4 of 5 workers have samples .* 'krum' needs 5 .* last batch"):
        train_laid_out(task, settings)


def test_it_is_chosen_by_the_section_of_the_config() -> None:
    assert isinstance(make_exchange(aggregation={"type": "krum", "byzantine": 1}), Gathered)
    assert not isinstance(make_exchange(aggregation={"type": "mean"}), Gathered)


def test_gradients_that_batch_normalisation_makes_parts_of_one_are_refused() -> None:
    def normalised() -> Any:
        return few_digits(batch_norm=True)

    together = replace(layout_settings({"data": 3}, steps=1), aggregation={"type": "median", "byzantine": 1})
    with pytest.raises(ConfigError, match=r"median chooses among .*; set train\.batch_norm to local"):
        train_laid_out(normalised, together)
    train_laid_out(normalised, replace(together, batch_norm="local"))
    train_laid_out(normalised, replace(together, aggregation={"type": "mean"}))
