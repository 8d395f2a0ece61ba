"""Two searches in one cluster at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import orchestray
from orchestray.platform.actors.pool import make_room

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from orchestray.platform.cluster.cluster import Cluster


@pytest.fixture(autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    make_room(cluster)
    yield
    make_room(cluster)


def config(name: str, method: dict[str, Any], **search: Any) -> dict[str, Any]:
    return {
        "name": name,
        "base": {
            "task": {"type": "support.odd_task:OddTask", "behaviour": "fine"},
            "train": {"batch_size": 8, "steps": 12, "optimizer": {"type": "sgd", "lr": 0.1}},
        },
        "search": {
            "method": method,
            "objective": {"metric": "accuracy"},
            "space": {"train.optimizer.lr": {"type": "choice", "values": [0.03, 0.1, 0.3]}},
            **search,
        },
    }


def test_two_searches_at_once_find_each_what_it_finds_alone(cluster: Cluster, tmp_path: Path) -> None:
    population = {"type": "population_based_training", "population": 3, "interval_steps": 4, "synchronous": True}
    configs = [
        config("grid", {"type": "grid"}),
        config("population", population, budget={"trials": 3, "steps_per_trial": 12}),
    ]

    def found(of: dict[str, Any], where: str, *overrides: str) -> dict[int, tuple[Any, ...]]:
        search = orchestray.search(of, runs_dir=tmp_path / where, overrides=overrides)
        assert search.best.load_model() is not None
        return {line["trial"]: (line["status"], line["objective"], line["config"]) for line in search.lines()}

    alone = [found(of, "alone", "search.parallel=1") for of in configs]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda of: found(of, "together"), configs))
    assert together == alone
    assert [len(lines) for lines in together] == [3, 3]
