"""Random numbers of a task that is built."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.process.alike import drawing_alike, torch_state


def drawn() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(1).item()]  # noqa: NPY002 - what tasks use


def test_generators_draw_the_same_inside_and_go_on_afterwards_as_if_nothing_had_been_drawn() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    undisturbed = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    with drawing_alike():
        first = drawn()
    assert drawn() == undisturbed
    with drawing_alike():
        assert drawn() == first


def test_nothing_is_collected_while_torch_holds_the_lock_of_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    read = torch.get_rng_state

    def noted() -> Any:
        found.append(gc.isenabled())
        return read()

    monkeypatch.setattr(torch, "get_rng_state", noted)
    assert torch.equal(torch_state(), read())
    with drawing_alike():
        pass
    assert found == [False, False]
