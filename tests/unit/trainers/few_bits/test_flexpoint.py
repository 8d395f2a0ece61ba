"""Flexpoint: its numbers against torch's own integers, and exponents that are predicted."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from orchestray.trainers.core.rng import RngKey
from orchestray.trainers.few_bits.flexpoint import Flex, FlexGradients

BITS, WINDOW = 16, 16


def flex(**changes: float) -> Flex:
    made = Flex(**{"mantissa_bits": BITS, "window": WINDOW, "headroom": 2.0, "deviations": 3.0, **changes})  # type: ignore[arg-type]
    made.draw = RngKey(step=1)
    return made


def next_step(module: Flex) -> None:
    assert module.draw is not None
    module.draw.step += 1


def fed(module: Flex, steps: list[Tensor]) -> list[Tensor]:
    """Return what a module makes of the tensors of successive steps."""
    found = []
    for values in steps:
        found.append(module(values))
        next_step(module)
    return found


def test_the_first_step_measures_and_later_ones_are_integers_with_one_exponent() -> None:
    torch.manual_seed(0)
    steps = [torch.randn(50) for _ in range(4)]
    module = flex()
    found = fed(module, steps)
    assert torch.equal(found[0], steps[0])
    for values, given in zip(steps[1:], found[1:], strict=True):
        assert not torch.equal(given, values)
    packed = module.pack(steps[-1])
    assert packed is not None
    mantissas, exponent = packed
    assert torch.equal(mantissas.float() * 2.0**exponent, found[-1])
    assert float((found[-1] - steps[-1]).abs().max()) <= 2.0**exponent / 2
    assert mantissas.nbytes + 1 == steps[-1].nbytes // 2 + 1  # and a byte for the exponent
    assert int(mantissas.abs().max()) > 2 ** (BITS - 4)  # of the 15 bits, prediction leaves two or three unused


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_numbers_are_those_of_torchs_fake_quantization_by_that_power_of_two(bits: int) -> None:
    torch.manual_seed(1)
    module = flex(mantissa_bits=bits)
    fed(module, [torch.randn(200), torch.randn(200)])
    values = torch.randn(200) * 3
    found = module(values)
    most = 2 ** (bits - 1) - 1
    expected = torch.fake_quantize_per_tensor_affine(values, 2.0 ** int(module.exponent), 0, -most, most)
    assert torch.equal(found, expected)


def test_the_exponent_is_that_of_algorithm_2() -> None:
    torch.manual_seed(2)
    module = flex(window=4)
    peaks = [3.0, 2.5, 4.2, 3.9, 2.2, 3.1]
    unit, seen = 2.0 ** (math.ceil(math.log2(3.0)) - BITS + 1), list[float]()
    for peak in peaks:
        module(torch.tensor([0.1, -peak]))
        next_step(module)
        module(torch.zeros(1))  # the next step begins
        assert module.draw is not None
        seen = [*seen, peak if not seen else round(peak / unit) * unit][-4:]
        expected = 2.0 * (statistics.fmean(seen) + 3.0 * statistics.pstdev(seen) + 100 * unit)
        unit = 2.0 ** (math.ceil(math.log2(expected)) - BITS + 1)
        assert 2.0 ** int(module.exponent) == unit


def test_no_number_overflows_once_the_prediction_has_warmed_up() -> None:
    """Use numbers that grow by 2 % a step and vary at random by a factor of 1.5."""
    torch.manual_seed(3)
    module = flex()
    steps = [torch.randn(300) * 1.02**step * (1 + 0.5 * torch.rand(())) for step in range(200)]
    fed(module, steps[:WINDOW])
    before = int(module.overflows)
    fed(module, steps[WINDOW:])
    assert int(module.overflows) == before
    fixed = flex(headroom=0.25, deviations=0.0)  # a prediction without headroom is too small
    fed(fixed, steps)
    assert int(fixed.overflows) > 10


def test_after_an_overflow_the_exponent_grows_until_the_numbers_fit() -> None:
    module = flex()
    steps = [torch.ones(3), torch.ones(3), *[torch.full((3,), 1000.0)] * 12]
    found = fed(module, steps)
    assert float(found[2].max()) < 1000  # saturated
    assert torch.allclose(found[-1], steps[-1], rtol=1e-3)
    assert 0 < int(module.overflows) < 10


def test_micro_batches_in_any_order_and_passes_that_do_not_count_predict_the_same() -> None:
    torch.manual_seed(4)
    parts = [torch.randn(10) * scale for scale in (1.0, 5.0, 2.0)]
    one, other = flex(), flex()
    fed(one, [torch.cat(parts)])
    for part in reversed(parts):
        other(part)
    other.is_counted = False
    other(torch.full((4,), 1e6))
    other.is_counted = True
    other.eval()
    other(torch.full((4,), 1e6))
    other.train()
    next_step(other)
    for module in (one, other):
        module(torch.zeros(1))
    assert torch.equal(one.exponent, other.exponent)
    assert torch.equal(one.history, other.history)


def test_gradients_have_an_exponent_of_their_own_and_values_stay() -> None:
    torch.manual_seed(5)
    module = FlexGradients(BITS, WINDOW, 2.0, 3.0)
    module.draw = RngKey(step=1)
    for _ in range(3):
        x = torch.randn(20, requires_grad=True)
        arriving = torch.randn(20) * 1e-5
        outputs = module(x * 1)
        assert torch.equal(outputs, x)
        outputs.backward(arriving)
        next_step(module)
    assert x.grad is not None
    unit = 2.0 ** int(module.exponent)
    assert unit < 1e-8
    assert torch.equal(x.grad, (arriving / unit).round() * unit)


def test_tensors_of_zeros_or_with_nan_predict_nothing() -> None:
    module = flex()
    fed(module, [torch.ones(3), torch.ones(3)])
    before = int(module.exponent)
    fed(module, [torch.zeros(3), torch.tensor([float("nan"), 1.0]), torch.zeros(0)])
    assert int(module.exponent) == before
