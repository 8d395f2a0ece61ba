"""The bytes that recomputation would spare are those that it spares, for at most one more forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.parallel.recompute.choose import recompute
from orchestray.trainers.parallel.recompute.meter import ActivationMeter
from orchestray.trainers.planning.analyse import analyse
from orchestray.trainers.planning.recomputation import recomputations, step_with
from orchestray.trainers.planning.subject import Subject


def subject(model: nn.Module, *shape: int, device: str = "meta") -> Subject:
    return Subject("model", model.to(device).train(), torch.zeros(shape, device=device), shape[0])


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))


def blocks(count: int = 9, width: int = 8) -> nn.Module:
    return nn.Sequential(*(block(width) for _ in range(count)))


def test_a_step_without_keeps_and_computes_what_the_analysis_says() -> None:
    as_it_is = step_with(subject(blocks(), 16, 8), "none")
    analysis = analyse(subject(blocks(), 16, 8))
    assert as_it_is is not None
    assert as_it_is.peak_bytes == analysis.saved_bytes
    assert as_it_is.work == analysis.forward.work + analysis.backward.work


def test_each_way_keeps_less_for_at_most_one_more_forward_pass() -> None:
    analysis = analyse(subject(blocks(), 16, 8))
    whole = analysis.forward.work + analysis.backward.work
    assert {each.how for each in analysis.recomputations} == {"blocks", "sqrt"}
    for each in analysis.recomputations:
        assert each.peak_bytes < 0.6 * analysis.saved_bytes
        assert whole < each.work <= whole + analysis.forward.work
        assert each.parts


@pytest.mark.parametrize("how", ["none", "blocks", "sqrt"])
def test_the_bytes_without_values_are_those_of_a_step_with_values(how: str) -> None:
    foretold = step_with(subject(blocks(), 16, 8), how)
    model, x = blocks(), torch.randn(16, 8)
    meter = ActivationMeter(model)
    recompute(model, how, meter=meter)
    with meter.watching(x):
        model(x).sum().backward()
    assert foretold is not None
    assert foretold.peak_bytes == meter.peak_bytes > 0


def test_a_model_without_such_parts_has_none_and_is_left_as_it_was() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out

    alone = subject(Own(), 3, 4)
    before = dict(vars(alone.model))
    assert recomputations(alone) == ()
    assert vars(alone.model).keys() == before.keys()
