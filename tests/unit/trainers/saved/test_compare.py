"""Differences of tensors that the command's own tests do not have."""

from __future__ import annotations

import math

import torch

from orchestray.trainers.saved.compare import compare_tensors


def test_complex_numbers_differ_by_their_imaginary_parts_as_well() -> None:
    found = compare_tensors({"w": torch.tensor([1 + 2j, 3 - 1j])}, {"w": torch.tensor([1 + 2j, 3 - 1.5j])})
    assert (found.max_difference, found.tensor) == (0.5, "w")
    assert compare_tensors({"w": torch.tensor([1j])}, {"w": torch.tensor([1.0])}).max_difference == math.inf
