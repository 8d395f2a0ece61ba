"""Sparse all-reduce: SparCML's merging that turns dense when that is shorter, Kylix's indices that are sent once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.compression.base import SparseCompressor
from orchestray.trainers.compression.delta import gap_bytes
from orchestray.trainers.compression.registry import make_compressor
from orchestray.trainers.compression.sparse import HEADER_BYTES, pack
from orchestray.trainers.sync.compressed.compressed_sum import MergedSum
from orchestray.trainers.sync.compressed.sparse_sum import SparseSum, Way
from support.threads import run_replicas

LENGTH = 400
WAYS: list[tuple[Way, int]] = [
    *(("gather", size) for size in (2, 3, 4, 5)),
    *(("doubling", size) for size in (2, 4, 8)),
]
"""Ways of the sum, each with numbers of ranks."""
Vector = tuple[Tensor, Tensor]


def drawn(rank: int, step: int, count: int, *, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> Vector:
    """Draw random values at random places."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    indices = torch.randperm(length, generator=generator)[:count].sort().values
    return indices, torch.randn(count, dtype=torch.float64, generator=generator).to(dtype)


def dense(vector: Vector, length: int = LENGTH) -> Tensor:
    return torch.zeros(length, dtype=vector[1].dtype).index_copy_(0, *vector)


def summed(
    vectors: Callable[[int, int], Vector], size: int, num_steps: int, way: Way, length: int = LENGTH
) -> tuple[list[list[Tensor]], list[list[int]]]:
    """Return each rank's sums, a step each, and the bytes it sent, a step each."""

    def run(collective: Collective) -> tuple[list[Tensor], list[int]]:
        total = SparseSum(collective, length, vectors(0, 1)[1].dtype, way)
        found, sent = [], []
        for step in range(1, num_steps + 1):
            before = collective.own_bytes_sent
            found.append(total.all_reduce(*vectors(collective.rank, step)))
            sent.append(collective.own_bytes_sent - before)
        return found, sent

    told = run_replicas(size, run)
    return [found for found, _ in told], [sent for _, sent in told]


@pytest.mark.parametrize(("way", "size"), WAYS)
def test_the_sparse_sum_is_the_dense_sum_and_the_same_bits_everywhere(way: Way, size: int) -> None:
    def vector(rank: int, step: int) -> Vector:
        return drawn(rank, step, (0, 1, 30, 200, LENGTH)[(step - 1) // 2])

    num_steps = 10  # each number of values twice in a row, at other places
    found, _ = summed(vector, size, num_steps, way)
    for step in range(1, num_steps + 1):
        wanted = torch.stack([dense(vector(rank, step)) for rank in range(size)]).sum(0)
        assert float((found[0][step - 1] - wanted).abs().max()) <= 1e-12
        assert all(torch.equal(of_rank[step - 1], found[0][step - 1]) for of_rank in found)


@pytest.mark.parametrize(("way", "size"), WAYS)
def test_indices_that_a_dense_message_left_out_are_not_taken_for_known(way: Way, size: int) -> None:
    def vector(rank: int, step: int) -> Vector:
        indices = drawn(0, 1, LENGTH - 1)[0]
        return indices, drawn(rank, step, LENGTH - 1)[1]

    found, _ = summed(vector, size, 3, way)
    for step in (1, 2, 3):
        wanted = torch.stack([dense(vector(rank, step)) for rank in range(size)]).sum(0)
        assert float((found[0][step - 1] - wanted).abs().max()) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_message_turns_dense_exactly_when_sparse_is_longer(dtype: torch.dtype) -> None:
    dense_bytes = HEADER_BYTES + LENGTH * dtype.itemsize
    turned = []
    for count in range(LENGTH + 1):
        indices, values = drawn(0, count, count, dtype=dtype)
        # Places as gaps, a byte or more each, or as a bit for every place there is.
        gaps = indices.diff(prepend=torch.tensor([-1])) - 1
        places = min(int(sum((gaps >= 128**power).sum() for power in range(1, 9))) + count, -(-LENGTH // 8))
        sparse_bytes = HEADER_BYTES + count * dtype.itemsize + places
        message = pack(indices, values, LENGTH)
        assert message.numel() == min(sparse_bytes, dense_bytes)
        turned.append(message.numel() == dense_bytes and sparse_bytes > dense_bytes)
    assert turned == sorted(turned)
    assert True in turned
    assert False in turned


def test_merged_vectors_turn_dense_on_the_way() -> None:
    """Sum two sparse vectors whose union is dense: the second round's messages are."""
    size, count = 4, 150

    def apart(rank: int, step: int) -> Vector:
        indices = torch.arange(rank * (LENGTH - count) // (size - 1), rank * (LENGTH - count) // (size - 1) + count)
        return indices, torch.ones(count, dtype=torch.float64)

    found, sent = summed(apart, size, 1, "doubling")
    assert float((found[0][0] - torch.stack([dense(apart(r, 1)) for r in range(size)]).sum(0)).abs().max()) == 0
    told = 16 * (size - 1) + 2 * 8  # sizes of all, and of each round's message
    first = HEADER_BYTES + 8 * count + 50
    union = {rank: torch.cat([apart(rank, 1)[0], apart(rank ^ 1, 1)[0]]).unique() for rank in range(size)}
    second = {rank: pack(places, torch.ones(len(places)).double(), LENGTH).numel() for rank, places in union.items()}
    assert [rows[0] for rows in sent] == [told + first + second[rank] for rank in range(size)]
    assert max(second.values()) > first


@pytest.mark.parametrize("size", [4, 8])
def test_merging_sends_less_than_gathering_where_places_coincide_and_no_more_where_not(size: int) -> None:
    places = drawn(9, 1, 40)[0]

    def shared(rank: int, step: int) -> Vector:
        return places, drawn(rank, step, 40)[1]

    rounds = size.bit_length() - 1
    for vectors, factor in ((shared, rounds / (size - 1)), (lambda rank, step: drawn(rank, step, 10), 1.0)):
        by_way = {way: summed(vectors, size, 1, way)[1][0][0] for way in ("gather", "doubling")}
        assert by_way["doubling"] <= factor * by_way["gather"] + 8 * rounds + 16 * (size - 1)


@pytest.mark.parametrize(("way", "size"), WAYS)
def test_when_places_repeat_only_values_are_sent(way: Way, size: int) -> None:
    def repeated(rank: int, step: int) -> Vector:
        return drawn(rank, 7 if step < 4 else 8, 30)[0], drawn(rank, step, 30)[1]

    found, sent = summed(repeated, size, 4, way)
    for step in range(1, 5):
        wanted = torch.stack([dense(repeated(rank, step)) for rank in range(size)]).sum(0)
        assert float((found[0][step - 1] - wanted).abs().max()) <= 1e-12
        assert all(torch.equal(of_rank[step - 1], found[0][step - 1]) for of_rank in found)
    told = 16 * (size - 1)
    for rows in sent:
        assert rows[1] == rows[2] < rows[0]
    if way == "gather":
        assert all(rows[1] == told + (size - 1) * 8 * 30 for rows in sent)
        assert all(rows[3] > rows[1] + (size - 1) * 30 for rows in sent)
    elif size == 4:
        merged = {r: torch.cat([repeated(r, 1)[0], repeated(r ^ 1, 1)[0]]).unique().numel() for r in range(size)}
        assert [rows[1] for rows in sent] == [told + 8 * (30 + merged[rank]) for rank in range(size)]


def test_the_sum_of_the_largest_hundredth_costs_a_fraction_of_the_dense_one() -> None:
    """Use 1 % of 20,000 float32 values: four bytes of value and one or two of place each, from each to each other."""
    length, count, size = 20_000, 200, 4
    _, sent = summed(
        lambda rank, step: drawn(rank, step, count, length=length, dtype=torch.float32), size, 1, "auto", length
    )
    ring = 2 * (size - 1) * 4 * length / size
    assert max(rows[0] for rows in sent) < ring / 30


def test_pairs_are_merged_among_a_power_of_two_of_workers_and_gathered_among_others() -> None:
    chosen = [
        run_replicas(size, lambda collective: SparseSum(collective, 1, torch.float64).way)[0] for size in (2, 3, 4)
    ]
    assert chosen == ["gather", "gather", "doubling"]
    with pytest.raises(ValueError, match="needs a power of two of ranks, got 3"):
        run_replicas(3, lambda collective: SparseSum(collective, 1, torch.float64, "doubling"))


def test_a_lone_worker_sends_nothing() -> None:
    from orchestray.platform.comm.solo import SoloCollective

    vector = drawn(0, 1, 20)
    assert torch.equal(SparseSum(SoloCollective(), LENGTH, torch.float64).all_reduce(*vector), dense(vector))


@pytest.mark.parametrize(
    ("settings", "pairs"),
    [
        ({"type": "threshold", "threshold": 1.0, "values": "threshold"}, 1),
        ({"type": "adaptive_threshold", "ratio": 0.2, "values": "means"}, 2),
    ],
)
def test_replicas_that_send_to_everybody_send_values_that_are_two_of_a_tensor_in_a_bit_each(
    settings: dict[str, Any], pairs: int
) -> None:
    """Count the sizes that all are given, and in each message the header, two values a pair, the bits, the places."""
    shapes, size = [(30, 10), (100,)], 3

    def run(collective: Collective) -> tuple[list[Tensor], list[Tensor], int, int]:
        generator = torch.Generator().manual_seed(collective.rank)
        given = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        mine, alone = (make_compressor(**settings, seed=0, worker=collective.rank, num_workers=size) for _ in range(2))
        for one in (mine, alone):
            one.init(given)
        total = MergedSum(cast(SparseCompressor, mine), given, collective).all_reduce(given, 1)
        own = alone.decompress(alone.compress(given, step=1))
        places = torch.cat([each.flatten() for each in own]).nonzero().view(-1)
        bits = min(gap_bytes(places), LENGTH // 8)
        message = HEADER_BYTES + 2 * pairs * 8 + -(-len(places) // 8) + bits
        return total, own, collective.own_bytes_sent, (size - 1) * (message + 2 * 8)

    found = run_replicas(size, run)
    wanted = [sum(own[index] for _, own, _, _ in found) for index in range(len(shapes))]
    for total, _, sent, expected in found:
        assert sent == expected
        assert all(float((one - other).abs().max()) <= 1e-12 for one, other in zip(total, wanted, strict=True))
