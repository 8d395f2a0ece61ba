"""Steps that the memory of their device does not hold end with a sentence that says what takes less."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import TrainingError
from orchestray.trainers.config.settings import Start
from orchestray.trainers.core.out_of_memory import told_if_out_of_memory
from orchestray.trainers.loop.host import ReplicaHost
from support.layouts import layout_settings, train_laid_out
from support.training import digits

TOO_MUCH = 2**58
"""Elements that no machine has memory for."""
ADVICE = r"train\.accumulate.*train\.recompute.*train\.batch_size.*strategy\.exchange\.shard"
HUNGRY = f"""
import torch

class Hungry(torch.optim.SGD):
    def step(self, closure=None):
        if self.param_groups[0]["params"][0].numel() > 1000:  # of the model, not of a first try
            torch.empty({TOO_MUCH})
        super().step(closure)
"""


class Hungry(nn.Module):
    """A model with an activation that no machine holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        return outputs + outputs.new_empty(TOO_MUCH)[0]


def test_a_pass_that_fails_for_want_of_memory_says_in_which_step_and_what_takes_less() -> None:
    def task() -> object:
        made = digits()
        build = made.build_model
        made.build_model = lambda: nn.Sequential(*list(build())[:-1], Hungry(list(build())[-1]))
        return made

    with pytest.raises(TrainingError, match=rf"at step 1 on worker \d.*can't allocate memory.*{ADVICE}"):
        train_laid_out(task, layout_settings(steps=2))


def test_an_optimizer_that_fails_for_want_of_memory_ends_the_run_with_what_takes_less(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY, encoding="utf-8")
    optimizer = {"type": f"{tmp_path / 'hungry.py'}:Hungry", "lr": 0.1}
    host = ReplicaHost(layout_settings(optimizer=optimizer, steps=2))
    with pytest.raises(TrainingError, match=rf"^The memory of cpu does not hold this training: .*{ADVICE}"):
        host.train(Start(time.time(), None, 0))


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), told_if_out_of_memory(torch.device("cpu")):
        torch.ones(2, 3) @ torch.ones(2, 3)
