"""A layer that a kernel computes as a whole is counted when those kernels are off, and they are put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestray.trainers.analysis.flops import flops_of
from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.analysis.unfused import unfused


def test_a_recurrence_on_a_cpu_is_counted_inside_and_named_as_uncounted_outside() -> None:
    layer, x = nn.LSTM(8, 16), torch.zeros(5, 3, 8)
    with torch.no_grad():
        whole = traced(lambda: layer(x))
        with unfused():
            apart = traced(lambda: layer(x))
    assert whole.uncounted
    assert (flops_of(whole), apart.uncounted) == (0, {})
    assert flops_of(apart) == 2 * 5 * 3 * 4 * 16 * (8 + 16)


def test_the_kernels_are_put_back_after_an_error() -> None:
    def fail() -> None:
        with unfused():
            assert not torch.backends.mkldnn.enabled
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert torch.backends.mkldnn.enabled
    assert torch.backends.mha.get_fastpath_enabled()
