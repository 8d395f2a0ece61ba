"""Seeds of all generators that a task may draw from."""

from __future__ import annotations

import pytest
import torch

from orchestray.trainers.core.rng import building


def test_a_gpu_that_starts_while_a_model_is_built_draws_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch.cuda.is_initialized()
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)  # torch keeps it for GPUs that start later
    with building(5):
        assert seeds == [5]
