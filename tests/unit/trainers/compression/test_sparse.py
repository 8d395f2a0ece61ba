"""Messages of a few values with their places: as short as can be, and back again."""

from __future__ import annotations

import pytest
import torch

from orchestray.trainers.compression.delta import gap_bytes
from orchestray.trainers.compression.sparse import HEADER_BYTES, pack, unpack

NUM_VALUES = 1000


def some(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    indices = torch.randperm(NUM_VALUES, generator=generator)[:count].sort().values
    return indices, torch.randn(count, dtype=dtype, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 10, 124, 125, 126, 500, 960, 970, 1000])
def test_values_and_places_come_back(count: int, dtype: torch.dtype) -> None:
    indices, values = some(count, dtype)
    found = unpack(pack(indices, values, NUM_VALUES), NUM_VALUES, dtype)
    for tensor, there in ((indices, found[0]), (values, found[1])):
        dense = torch.zeros(NUM_VALUES, dtype=dtype).index_copy_(0, indices, tensor.to(dtype))
        assert torch.equal(torch.zeros(NUM_VALUES, dtype=dtype).index_copy_(0, found[0], there.to(dtype)), dense) or (
            found[0].numel() == NUM_VALUES and torch.equal(found[0], torch.arange(NUM_VALUES))
        )
    assert torch.equal(torch.zeros(NUM_VALUES, dtype=dtype).index_copy_(0, *found)[indices], values)


@pytest.mark.parametrize("count", [0, 1, 10, 124, 125, 126, 500, 960, 967, 968, 969, 970, 1000])
def test_a_message_is_as_long_as_the_shortest_of_the_three_forms(count: int) -> None:
    indices, values = some(count)
    message = pack(indices, values, NUM_VALUES)
    forms = (4 * count + gap_bytes(indices), 4 * count + NUM_VALUES // 8, 4 * NUM_VALUES)
    assert message.numel() == HEADER_BYTES + min(forms)


def test_a_message_turns_dense_exactly_when_the_sparse_one_would_be_longer() -> None:
    dense = [unpack(pack(*some(count), NUM_VALUES), NUM_VALUES, torch.float32)[0].numel() for count in range(900, 1000)]
    # A bit for every place takes 125 bytes, as much as 31.25 values.
    assert dense == [count if 4 * count + 125 <= 4000 else NUM_VALUES for count in range(900, 1000)]


@pytest.mark.parametrize("wrong", ["nothing", "cut", "longer", "more values than places", "another length"])
def test_a_message_that_is_not_as_long_as_it_says_is_refused(wrong: str) -> None:
    message = pack(*some(10), NUM_VALUES)
    num_values = NUM_VALUES
    if wrong == "nothing":
        message = message[:0]
    elif wrong == "cut":
        message = message[:20]
    elif wrong == "longer":
        message = torch.cat([message, message.new_zeros(1)])
    elif wrong == "more values than places":
        message = pack(*some(1000), NUM_VALUES)
        num_values = 999
    else:
        message = pack(*some(500), NUM_VALUES)
        num_values = 2000
    with pytest.raises(ValueError, match=r"[Ss]parse message|codes of 1 bits"):
        unpack(message, num_values, torch.float32)
