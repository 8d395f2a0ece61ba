"""Methods against a table whose scores are known: the keys are those of the space, and nothing is looked up twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.tabular import table as tables
from lab.tabular.benchmark import TabularRun, run_on_table
from lab.tabular.space import table_cells
from lab.tabular.table import TABLE_FILE, Table, TableSpace, genome_at
from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.search.methods.base import Method
from orchestray.search.registry.methods import make_method


@pytest.fixture(scope="module")
def table() -> Table:
    """Return the networks of the stored table, with losses of this test: each choice has its part in them."""
    stored = Table.read(TABLE_FILE)
    first = np.unique(stored.index, return_index=True)[1]
    parts: dict[tuple[str, object], float] = {}
    rng = np.random.default_rng(0)
    losses = [
        sum(parts.setdefault(choice, float(rng.normal())) for choice in genome_at(int(number)).items())
        for number in first
    ]
    loss = np.array(losses)[:, None] + 0.01 * rng.normal(size=(len(losses), 3))
    return replace(stored, loss=loss, accuracy=-loss)


def search(table: Table, method: str, trials: int, **parameters: object) -> TabularRun:
    def make(space: TableSpace) -> Method:
        return make_method(method, space={}, architecture=space, trials=trials, **parameters)

    return run_on_table(make, table=table, top=0.01)


def test_the_keys_of_the_table_are_those_of_its_space(table: Table) -> None:
    space, looked_up, rng = table_cells(), TableSpace(table), np.random.default_rng(1)
    genomes = [space.sample(rng) for _ in range(60)]
    assert [looked_up.key(genome) for genome in genomes] == [space.key(genome) for genome in genomes]
    assert len(table.index) == space.count()
    assert sorted(set(table.index.tolist())) == list(range(len(table.keys)))


def test_a_run_has_no_network_twice_and_says_when_it_came_to_the_top(table: Table) -> None:
    for method in ("random", "regularized_evolution", "q_learning"):
        run = search(table, method, 300)
        assert len(run.rows) == len(set(run.rows)) == 300
        assert np.all(np.diff(run.regrets) <= 0)
        assert np.all(run.regrets >= 0)
        top = set(table.top(0.01).tolist())
        reached = [number for number, row in enumerate(run.rows, start=1) if row in top]
        assert run.evaluations_to_top == (reached[0] if reached else None)


def test_evolution_comes_to_the_top_of_a_table_of_parts_before_random_draws_do(table: Table) -> None:
    def mean(method: str, **parameters: object) -> float:
        runs = [search(table, method, 300, seed=seed, **parameters) for seed in range(6)]
        return float(np.mean([run.evaluations_to_top or 300 for run in runs]))

    assert mean("regularized_evolution", population=20, sample_size=10) < 0.8 * mean("random")


def test_a_table_is_read_as_it_was_written(table: Table, tmp_path: Path) -> None:
    table.write(tmp_path / "table.npz")
    again = Table.read(tmp_path / "table.npz")
    assert again.keys == table.keys
    assert np.array_equal(again.index, table.index)
    assert np.array_equal(again.loss, table.loss)
    assert again.is_complete


def test_a_table_that_is_not_made_to_its_end_is_refused(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = table.loss.copy()
    loss[3] = np.nan
    replace(table, loss=loss).write(tmp_path / "table.npz")
    monkeypatch.setattr(tables, "TABLE_FILE", tmp_path / "table.npz")
    with pytest.raises(OrchestrayError, match=r"1 of the 2450 networks.*make_table"):
        tables.load_table.__wrapped__()


def test_a_method_that_asks_for_what_is_in_no_row_is_told_so(table: Table) -> None:
    with pytest.raises(ConfigError, match=r"every cell of 2 nodes .* is none of them: .* grow_by: nodes"):
        search(table, "progressive", 20, grow_by="nodes")
