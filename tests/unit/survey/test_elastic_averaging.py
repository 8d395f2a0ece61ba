"""Group F: elastic averaging SGD."""

from __future__ import annotations

from typing import Any

import pytest

from support.training import Trained, digits, same_bits, train


def trained(exchange: dict[str, Any], data: int = 3, *, steps: int = 12, seed: int = 0, **keys: Any) -> list[Trained]:
    chosen = {"optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}, **keys}
    return train(digits(), data, exchange=exchange, steps=steps, seed=seed, **chosen)


@pytest.mark.parametrize("consistency", ["synchronous", "asynchronous"])
def test_easgd_without_elasticity_is_independent_runs_bit_for_bit(consistency: str) -> None:
    elastic = trained({"type": "elastic_averaging", "alpha": 0.0, "consistency": consistency})
    alone = trained({"type": "averaging", "every": "end"})
    assert all(same_bits(mine.after, its.after) for mine, its in zip(elastic, alone, strict=True))
    assert not same_bits(alone[0].after, alone[1].after)
    # Nobody has pulled at the centre: the run ends where it began.
    assert all(same_bits(mine.before, dict(mine.replica.model.state_dict())) for mine in elastic)


def test_easgd_pulls_are_equal_and_opposite_while_training() -> None:
    """Check that optimizers alone move the sum of replicas and centre: pulls of half the size leave it as it is."""
    steps = 1
    sums = []
    for alpha in (0.1, 0.2):
        replicas = trained({"type": "elastic_averaging", "alpha": alpha, "every": 1}, steps=steps)
        exchange: Any = replicas[0].replica.exchange
        assert exchange.run_report() == {"pulls": steps}
        centre = replicas[0].replica.model.state_dict()
        sums.append({name: sum(each.after[name] for each in replicas) + centre[name] for name in centre})
    assert max(float((sums[0][name] - sums[1][name]).abs().max()) for name in sums[0]) <= 1e-12


@pytest.mark.parametrize("consistency", ["synchronous", "asynchronous"])
def test_easgd_centre_learns_to_read_digits_while_it_meets_seldom(consistency: str) -> None:
    exchange = {"type": "elastic_averaging", "every": 4, "consistency": consistency}
    accuracies = []
    for seed in range(2):
        keys = {"batch_size": 64, "precision": "float32", "validate_every_steps": 60}
        found = trained(exchange, 2, steps=60, seed=seed, **keys)
        validation = found[0].outcome.final["validation"]
        assert validation is not None
        accuracies.append(validation["accuracy"])
    assert min(accuracies) > 0.85
