"""A run that two workers trained is made smaller with fine-tuning by two workers, and a task in a file with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

import orchestray
from orchestray.trainers.driver.compressed_run import Recipe, write_compressed

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

TASK = """
from torch import nn
from orchestray.trainers.tasks.digits import Digits


class Own(Digits):
    def __init__(self):
        super().__init__(model="cnn")

    def build_model(self):
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(64, 10))
"""


def test_the_workers_of_the_run_train_what_is_left_of_a_users_network_in_factors(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(TASK)
    config = {
        "name": "own",
        "task": {"type": f"{file}:Own"},
        "train": {"batch_size": 64, "epochs": 1, "optimizer": {"type": "adam", "lr": 0.003}},
        "strategy": {"network": {"data": 2}},
    }
    run = orchestray.train(config, runs_dir=tmp_path / "runs")
    file.unlink()  # the run has a copy
    recipe = Recipe(sparsity=0.5, bits=4, tucker=0.5, fine_tune_steps=20)
    written = write_compressed(run, recipe, name="small", runs_dir=tmp_path / "runs")
    model = written.load_model()
    weights = [each for each in model.parameters() if each.dim() > 1]
    left = sum(int(each.count_nonzero()) for each in weights)
    assert left == written.result["compressed"]["weights_left"] <= 0.5 * sum(each.numel() for each in weights) + 1
    assert all(len(torch.unique(each)) <= 17 for each in weights)
    assert model[2][1].weight.shape == (8, 8, 3, 3)
    stages = written.result["compressed"]["validation"]
    assert stages["pruned, trained"]["loss"] < stages["pruned"]["loss"]
