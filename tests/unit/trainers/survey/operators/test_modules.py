"""Operators as modules have the costs that the survey promises, in a whole step."""

from __future__ import annotations

import torch
from torch import nn

from orchestray.trainers.planning.analyse import Analysis, analyse
from orchestray.trainers.planning.subject import subject_of

MODULES = "orchestray.trainers.survey.operators.modules"


def analysed(name: str, *shapes: str) -> Analysis:
    return analyse(subject_of(f"{MODULES}:{name}", shapes=shapes))


def test_a_wavefront_has_the_work_of_layers_one_after_the_other_and_a_part_of_their_depth() -> None:
    steps, layers = 16, 4
    one, other = (analysed(name, f"{steps},2,64") for name in ("WavefrontLSTM", "LayeredLSTM"))
    assert abs(one.forward.multiplications / other.forward.multiplications - 1) < 0.01
    assert other.forward.depth / one.forward.depth >= 0.9 * steps * layers / (steps + layers - 1)


def test_three_levels_of_strassen_take_a_third_fewer_multiplications_and_no_backward_pass() -> None:
    analysis = analysed("Strassen", "64,64", "64,64")
    assert analysis.forward.multiplications == 7**3 * 8**3
    assert analysis.backward.work == 0
    assert analysis.notes[-1] == "no backward pass: nothing needs a gradient"


def test_each_module_computes_and_nothing_of_it_is_left_uncounted() -> None:
    for name, *shapes in (("FixedPoint", "8,64"), ("ChwnConvolution", "16,8,8,4"), ("WavefrontLSTM", "3,2,64")):
        assert analysed(name, *shapes).uncounted == {}
        subject = subject_of(f"{MODULES}:{name}", shapes=shapes, device=torch.device("cpu"))
        assert isinstance(subject.model, nn.Module)
        assert torch.isfinite(subject.forward())
