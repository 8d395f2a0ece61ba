"""Draws for a sample depend on seed, epoch and sample, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from orchestray.platform.data.draws import SampleDraws, TorchDraws
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.data.source import open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import TaskError
from support.accounting import WriteParquet, numbered

DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "randint": lambda: torch.randint(0, 99, (3,)),
    "randperm": lambda: torch.randperm(9),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "uniform_": lambda: torch.empty(3).uniform_(-1, 1),
    "randn_like": lambda: torch.randn_like(torch.zeros(3)),
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(40), 9),
    "beta": lambda: torch.distributions.Beta(0.4, 0.4).sample((3,)),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(),
}


def augmented(columns: pa.Table, draws: Any) -> dict[str, Tensor]:
    """Return the numbers of rows, and what is drawn for each."""
    drawn = [float(each.random()) for each in draws]
    return {"number": torch.tensor(columns["number"].to_pylist()), "drawn": torch.tensor(drawn, dtype=torch.float64)}


def drawn(source: Any, epoch: int = 0, start_step: int = 0, **cut: Any) -> dict[int, float]:
    """Return what all replicas draw for each sample of an epoch."""
    found: dict[int, float] = {}
    for rank in range(cut.get("num_replicas", 1)):
        stream = SampleStream(source, refuse, to_training_batch=augmented, rank=rank, **{"batch_size": 8, **cut})
        with stream.epoch(epoch, start_step) as shares:
            for part in (part for share in shares for part in share.micro_batches):
                pairs = zip(part.batch["number"].tolist(), part.batch["drawn"].tolist(), strict=True)
                found.update(pairs)
    return found


def refuse(columns: pa.Table) -> dict[str, Tensor]:
    raise AssertionError("to_batch makes no batch to train on")


@pytest.mark.parametrize("window_rows", [10, 1000])
@pytest.mark.parametrize("cut", [{"num_replicas": 3}, {"accumulate": 4}, {"batch_size": 5}, {"prefetch": 7}], ids=str)
def test_a_sample_draws_the_same_however_batches_are_cut(
    write_parquet: WriteParquet, cut: dict[str, Any], window_rows: int
) -> None:
    source = open_source(write_parquet(40, 13, row_group_rows=6), window_rows=window_rows)
    whole = drawn(source)
    assert len(set(whole.values())) == 53
    assert drawn(source, **cut) == whole


def test_a_resumed_epoch_draws_what_the_whole_one_did() -> None:
    source = open_source(numbered(0, 40))
    rest = drawn(source, epoch=2, start_step=3)
    whole = drawn(source, epoch=2)
    assert len(rest) == 16
    assert rest == {number: whole[number] for number in rest}


def test_another_epoch_and_another_seed_draw_something_else() -> None:
    source = open_source(numbered(0, 40))
    runs = [drawn(source), drawn(source, epoch=1), drawn(source, seed=1)]
    assert all(len({run[number] for run in runs}) == 3 for number in range(40))


def test_shares_on_request_draw_the_same() -> None:
    class Order:
        epoch, step_in_epoch, batch_samples, num_micro_batches = 3, 1, 8, 1
        pieces = ((8, 16),)

    source = open_source(numbered(0, 40))
    with ShareReader(source, refuse, to_training_batch=augmented) as shares:
        (part,) = shares.read(Order()).micro_batches
    whole = drawn(source, epoch=3)
    pairs = zip(part.batch["number"].tolist(), part.batch["drawn"].tolist(), strict=True)
    assert all(whole[number] == value for number, value in pairs)


def test_the_sample_of_an_empty_share_has_the_form_of_the_others() -> None:
    stream = SampleStream(open_source(numbered(0, 4)), refuse, to_training_batch=augmented, batch_size=2)
    assert stream.one_sample()["drawn"].shape == (1,)


def test_a_generator_goes_on_where_it_stopped_and_a_part_has_its_own() -> None:
    ids = np.array([4, 7, 9])
    draws = SampleDraws(ids, seed=0, epoch=0)
    first = draws[1].random()
    assert draws[1].random() != first
    assert draws[1] is draws[-2]
    assert SampleDraws(ids, seed=0, epoch=0)[1:][0].random() == first
    assert len(draws[1:]) == 2
    with pytest.raises(IndexError):
        draws[3]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_torch_draws_by_the_sample_and_leaves_the_process_s_generator_alone(draw: Callable[[], Any]) -> None:
    before = torch.get_rng_state()

    def of_sample(sample: int) -> Any:
        with TorchDraws(SampleDraws(np.array([sample]), seed=0, epoch=0)[0]):
            return draw()

    with ThreadPoolExecutor(4) as pool:  # at the same time
        found = list(pool.map(of_sample, [1, 2] * 20))
    assert all(torch.equal(value, found[index % 2]) for index, value in enumerate(found))
    assert not torch.equal(found[0], found[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_torch_can_only_draw_for_the_whole_process_is_refused() -> None:
    with TorchDraws(np.random.default_rng(0)), pytest.raises(TaskError, match="torch's dropout, whose random numbers"):
        torch.nn.functional.dropout(torch.ones(3))
