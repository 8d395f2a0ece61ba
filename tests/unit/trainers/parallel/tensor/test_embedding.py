"""Embeddings split by rows, alone and tied to the output layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.apply import split_model
from support.split_models import build, check_split
from support.threads import run_replicas

ROWS, WIDTH = 11, 6
TOKENS = torch.tensor([[0, 3, 10, 3, 7], [5, 5, 1, 9, 8]])


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(ROWS, WIDTH, padding_idx=7), nn.Linear(WIDTH, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.tokens = nn.Embedding(ROWS, WIDTH)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.tokens(tokens).tanh())
        return y


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_split_embedding_trains_as_the_plain_one(size: int) -> None:
    check_split(embedded, {"0": "embedding"}, TOKENS, size)


@pytest.mark.parametrize("index", [-1, ROWS])
def test_an_index_that_the_whole_table_has_not_is_an_error_as_in_a_plain_one(index: int) -> None:
    def run(group: Collective) -> None:
        model = build(embedded)
        split_model(model, {"0": "embedding"}, lambda: group, group.rank, group.size)
        assert model(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 4)
        model(torch.tensor([[0, index]]))

    with pytest.raises(IndexError, match=f"the table has {ROWS} rows"):
        run_replicas(2, run)


@pytest.mark.parametrize("size", [2, 3])
def test_a_tied_output_layer_stays_tied(size: int) -> None:
    workers = check_split(Tied, {"tokens": "embedding", "head": "output_gathered"}, TOKENS, size)
    pieces = workers[0][0].pieces
    assert pieces["tokens.weight"] == pieces["head.weight"]
    assert pieces["tokens.weight"].name == "head.weight"


def test_a_tied_tensor_split_in_one_place_only_is_refused() -> None:
    for plan in ({"tokens": "embedding"}, {"tokens": "embedding", "head": "input_scattered"}):
        model = Tied()
        with pytest.raises(ConfigError, match=r"head.weight and tokens.weight are one tensor \(tied\)"):
            split_model(model, plan, lambda: None, 0, 2)  # type: ignore[arg-type, return-value]
        assert model.head.weight is model.tokens.weight
        assert model.head.weight.shape == (ROWS, WIDTH)


def test_bytes_are_those_of_the_outputs_added_up() -> None:
    def run(group: Collective) -> tuple[int, int]:
        model = build(embedded)
        split_model(model, {"0": "embedding"}, lambda: group, group.rank, group.size)
        y = model(TOKENS)
        forward = group.bytes_sent
        y.sum().backward()
        return forward, group.bytes_sent - forward

    assert run_replicas(2, run) == [(TOKENS.numel() * WIDTH * 8, 0)] * 2


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_options_that_need_the_whole_table_are_refused(option: str) -> None:
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH, **{option: 1.0 if option == "max_norm" else True}))
    with pytest.raises(ConfigError, match=f"cannot be split with the option {option}"):
        split_model(model, {"0": "embedding"}, lambda: None, 0, 2)  # type: ignore[arg-type, return-value]
