"""A network found by a search is trained by two workers as any model is, and read back where its files are no more."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import torch

import orchestray
from orchestray.platform.cluster.cluster import Cluster
from orchestray.search.spaces.searched_task import searched_task_section

SPACE = """
    from torch import nn

    class Widths:
        def sample(self, rng):
            return 4
        def mutate(self, genome, rng):
            return genome
        def crossover(self, a, b, rng):
            return a
        def build(self, genome, input_shape, num_outputs):
            return nn.Sequential(nn.Linear(input_shape[0], genome), nn.ReLU(), nn.Linear(genome, num_outputs))
"""


def test_a_network_of_an_own_space_is_trained_and_read_back_after_its_file_has_gone(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(dedent(SPACE))
    section = searched_task_section({"type": "digits"}, f"{file}:Widths", 6)
    file.unlink()
    train = {"batch_size": 256, "steps": 3, "optimizer": {"type": "sgd", "lr": 0.1}}
    config = {"name": "found", "task": section, "train": train, "strategy": {"network": {"data": 2}}}
    run = orchestray.train(config, runs_dir=tmp_path)
    assert run.result["status"] == "succeeded"
    found = orchestray.load_run(tmp_path / "found")
    model, task = found.load_model(), found.load_task()
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(6, 64), (6,), (10, 6), (10,)]
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        accuracy = float(task.metrics(model(batch["inputs"]), batch)["accuracy"])
    assert abs(accuracy - run.result["final"]["validation"]["accuracy"]) < 1e-6
