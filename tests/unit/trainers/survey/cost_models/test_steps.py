"""Steps are run with real values in the shapes of those on `meta`."""

from __future__ import annotations

import torch
from torch import nn

from orchestray.trainers.survey.cost_models.steps import materialised, steps_s


def test_values_are_real_finite_and_in_the_shapes_and_types_of_before() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 5))
        tokens = torch.empty(6, 3, dtype=torch.int64)
    real, inputs = materialised(model, {"tokens": tokens})
    assert (inputs["tokens"].shape, inputs["tokens"].dtype) == ((6, 3), torch.int64)
    assert real(inputs["tokens"]).isfinite().all()
    assert all(not each.is_meta for each in (*real.parameters(), *real.buffers()))


def test_each_step_is_timed_and_begins_without_gradients() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(4, 3)
    times_s = steps_s(lambda: layer(x).sum(), lambda: list(layer.parameters()), 3)
    assert len(times_s) == 3
    assert min(times_s) > 0
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 4.0))  # of one step, not of three
