"""Group D: servers of several sites, with little between them (Gaia, Hsieh et al. 2017), as whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from orchestray.trainers.driver.servers.usage import add_usage
from support.central_run import central_settings, train_central
from support.training import digits

SEEDS, EPOCHS = range(3), 4


def trained(seed: int, significance: float, directory: Path) -> tuple[float, float]:
    """Train two sites, one of two workers and one of one, for a few epochs.

    The rate falls to nothing, so that the accuracy at the end depends little on which update came first. Return it, and
    the part of the dense bytes that crossed between the sites.
    """
    exchange = {"consistency": "asynchronous", "groups": 2, "significance": significance}
    chosen = {"optimizer": {"type": "sgd", "lr": 0.6}, "lr_schedule": {"type": "cosine"}, "precision": "float32"}
    settings = central_settings(3, exchange, steps=None, epochs=EPOCHS, batch_size=96, **chosen)
    directory.mkdir()
    found = train_central(_task, replace(settings, seed=seed, accumulate=1), directory)
    assert found.outcome.samples == EPOCHS * len(_task().dataset("train"))
    leaves = [one for one in found.servers if "across_bytes" in one]
    assert len(leaves) == 2
    add_usage(found.outcome, found.workers, found.servers, bytes_reported=0)
    across = found.outcome.summary["bytes_across_groups"]
    assert across["sent"] == sum(one["across_bytes"] for one in leaves)
    assert 0 < across["sent"] < found.outcome.bytes_sent  # within the sites more goes to and fro
    return found.lines[-1]["accuracy"], across["sent"] / across["dense"]


def _task() -> Any:
    return digits(hidden=[64])


@pytest.mark.slow
def test_sites_that_exchange_significant_updates_alone_are_as_accurate_with_a_third_of_the_bytes_between_them(
    tmp_path: Path,
) -> None:
    """Compare over three seeds: the mean accuracy is within a point of that of sites that exchange every update."""
    every = [trained(seed, 0.0, tmp_path / f"every-{seed}") for seed in SEEDS]
    few = [trained(seed, 0.02, tmp_path / f"few-{seed}") for seed in SEEDS]
    assert fmean(accuracy for accuracy, _ in every) > 0.85
    assert abs(fmean(accuracy for accuracy, _ in few) - fmean(accuracy for accuracy, _ in every)) <= 0.01
    assert all(part < 1 / 3 for _, part in few)
    assert all(part < other for (_, part), (_, other) in zip(few, every, strict=True))
