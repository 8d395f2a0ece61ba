"""Tensors that cannot be gathered are refused with a sentence on what to gather instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import TrainingError
from support.layouts import layout_settings, train_laid_out
from support.training import Rows


class Gathering(Rows):
    """A task whose loss gathers the signs of its targets in some form."""

    def __init__(self, form: Any) -> None:
        inputs = np.random.default_rng(0).normal(size=(40, 4))
        super().__init__(inputs, inputs.sum(1), lambda: nn.Linear(4, 1))
        self.form = form

    def loss(self, outputs: Tensor, batch: dict[str, Tensor], gather: Any) -> Tensor:  # type: ignore[override]
        found, signs = gather((outputs, self.form(batch["targets"].sign())))
        return (found.reshape(-1) * signs).mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


def trained(form: Any) -> Any:
    settings = layout_settings({"data": 2, "microbatches": None}, steps=2, batch_size=20)
    return train_laid_out(lambda: Gathering(form), settings)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_tensors_of_common_dtypes_are_gathered(dtype: torch.dtype) -> None:
    assert len(trained(lambda signs: signs.to(dtype)).losses) == 2


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda signs: signs.sum(), "a tensor of a single number.*Gather a value for each sample"),
        (lambda signs: signs.to(torch.int16), r"a tensor of torch.int16.*Convert it before"),
    ],
    ids=["a number", "int16"],
)
def test_what_cannot_be_joined_is_refused(form: Any, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        trained(form)
