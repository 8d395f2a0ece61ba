"""Group D: servers of several sites, with little between them (Gaia, Hsieh et al. 2017), as whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from orchestray.trainers.central.usage import add_usage
from support.central_run import central_settings, train_central
from support.training import digits

SEEDS = range(3)


def trained(seed: int, significance: float, directory: Path) -> tuple[float, float]:
    """Accuracy after a few epochs of two sites with two workers each, and the part of the dense bytes that crossed."""
    exchange = {"consistency": "asynchronous", "groups": 2, "significance": significance}
    optimizer = {"type": "sgd", "lr": 0.2}
    settings = central_settings(
        4, exchange, steps=None, epochs=5, batch_size=64, optimizer=optimizer, precision="float32"
    )
    directory.mkdir()
    found = train_central(_task, replace(settings, seed=seed, accumulate=1), directory)
    assert found.outcome.samples == 5 * len(_task().dataset("train"))
    leaves = [one for one in found.servers if "across_bytes" in one]
    assert len(leaves) == 2
    add_usage(found.outcome, found.workers, found.servers, bytes_told=0)
    across = found.outcome.told["bytes_across_groups"]
    assert across["sent"] == sum(one["across_bytes"] for one in leaves)
    assert 0 < across["sent"] < found.outcome.bytes_sent  # within the sites more goes to and fro
    return found.lines[-1]["accuracy"], across["sent"] / across["dense"]


def _task() -> Any:
    return digits(hidden=[64])


def test_sites_that_exchange_significant_updates_alone_are_as_accurate_with_a_third_of_the_bytes_between_them(
    tmp_path: Path,
) -> None:
    """Over three seeds: the mean accuracy within a point of that of sites that exchange every update."""
    every = [trained(seed, 0.0, tmp_path / f"every-{seed}") for seed in SEEDS]
    few = [trained(seed, 0.01, tmp_path / f"few-{seed}") for seed in SEEDS]
    assert fmean(accuracy for accuracy, _ in every) > 0.85
    assert abs(fmean(accuracy for accuracy, _ in few) - fmean(accuracy for accuracy, _ in every)) <= 0.01
    assert all(part < 1 / 3 for _, part in few)
    assert all(part < other for (_, part), (_, other) in zip(few, every, strict=True))
