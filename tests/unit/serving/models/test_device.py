"""The share of a GPU that a process may use."""

from __future__ import annotations

import pytest
import torch

from orchestray.serving.models.device import chosen_device, limit_memory


@pytest.mark.parametrize(("num_gpus", "share"), [(0, None), (0.25, 0.25), (1, None), (2, None)])
def test_a_fraction_of_a_gpu_is_a_share_of_its_memory_and_whole_gpus_have_no_bound(
    monkeypatch: pytest.MonkeyPatch, num_gpus: float, share: float | None
) -> None:
    bounds: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: bounds.append(given))
    limit_memory(num_gpus)
    assert bounds == ([] if share is None else [(share, torch.device("cuda", 0))])
    assert chosen_device(num_gpus) == (torch.device("cuda", 0) if num_gpus else torch.device("cpu"))
