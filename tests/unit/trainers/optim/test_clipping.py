"""Norms and totals of a gradient whose parts are spread over workers have the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest

from support.layouts import layout_settings, train_laid_out
from support.training import digits, same_bits

STEPS: dict[str, dict[str, Any]] = {
    "clipped": {"grad_clip": 0.05},  # about a third of the norm
    "kfac": {"optimizer": {"type": "kfac", "lr": 0.05, "damping": 0.03, "kl_clip": 1e-4}},
    "yellowfin": {"optimizer": {"type": "yellowfin"}},
}


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("step", STEPS)
def test_a_pipeline_has_the_bits_of_one_process_wherever_it_is_cut(step: str, precision: str) -> None:
    def trained(**network: Any) -> Any:
        settings = layout_settings(network, steps=4, precision=precision, **STEPS[step])
        return train_laid_out(lambda: digits(hidden=[14, 12, 10], validation_fraction=0.02), settings).weights

    alone = trained()
    for first in ("2", "4"):
        assert same_bits(trained(pipeline=2, split=[first]), alone), f"cut before layer {first}"
