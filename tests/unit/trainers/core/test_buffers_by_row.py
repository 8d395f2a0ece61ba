"""Buffers whose rows belong to samples: each row is that of the replica that changed it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.core.buffers_by_row import agree_by_row, refuse_by_row
from support.threads import run_replicas

BEFORE = torch.arange(12.0).reshape(6, 2)


def agreed(
    changes: list[dict[int, Any]], dtype: torch.dtype = torch.float32, empty: tuple[int, ...] = ()
) -> list[Tensor]:
    """Return each replica's buffer after rows were changed by each of them."""

    def run(group: Collective) -> Tensor:
        before = BEFORE.to(dtype)
        buffer = before.clone()
        for row, value in changes[group.rank].items():
            buffer[row] = value
        agree_by_row("bank", buffer, before, group, is_empty=group.rank in empty)
        return buffer

    return run_replicas(len(changes), run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_each_row_is_that_of_the_replica_that_changed_it_to_the_bit(dtype: torch.dtype) -> None:
    value = torch.tensor([1 / 3, 0.0]).to(dtype)
    expected = BEFORE.to(dtype)
    expected[0] = expected[4] = value
    for buffer in agreed([{4: value}, {}, {0: value}], dtype):
        assert torch.equal(buffer, expected)


def test_what_a_pass_without_samples_has_changed_does_not_count() -> None:
    for buffer in agreed([{1: 7.0}, {0: 9.0}], empty=(1,)):
        expected = BEFORE.clone()
        expected[1] = 7.0
        assert torch.equal(buffer, expected)


def test_a_row_that_two_replicas_have_changed_is_an_error_on_both() -> None:
    with pytest.raises(TrainingError, match="row 3 was changed by the samples of several replicas in one step"):
        agreed([{3: 7.0}, {3: 7.0}])


def test_a_buffer_that_the_step_has_resized_is_an_error() -> None:
    def run(group: Collective) -> None:
        with pytest.raises(TrainingError, match=r"'bank' is agreed on row by row .* in build_model"):
            agree_by_row("bank", torch.zeros(3, 2), BEFORE, group, is_empty=False)

    run_replicas(2, run)


class Bank(nn.Module):
    buffers_by_row = ("bank", "absent")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(3, 2))
        self.register_buffer("absent", None)
        self.register_buffer("other", torch.zeros(1))


def test_a_model_with_such_buffers_is_refused_by_name_where_means_are_taken() -> None:
    refuse_by_row(nn.BatchNorm1d(3), "key: value")
    with pytest.raises(ConfigError, match=r"config: key: value takes means of buffers, and each row of '0\.bank'"):
        refuse_by_row(nn.Sequential(Bank()), "key: value")
