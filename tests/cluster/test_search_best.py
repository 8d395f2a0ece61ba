"""What a search says of its best network is what its saved weights do: loaded, and served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import orchestray
from orchestray.platform.cluster.cluster import Cluster
from orchestray.serving.models.load import load_served_model

CONFIG = {
    "name": "networks",
    "base": {
        "task": {"type": "digits"},
        "train": {"batch_size": 64, "optimizer": {"type": "adamw", "lr": 0.01}},
    },
    "search": {
        "method": {"type": "regularized_evolution", "population": 2, "sample_size": 2},
        "objective": [{"metric": "accuracy"}, {"metric": "parameters"}],
        "architecture": {"space": "chain", "channels": [4, 8], "widths": [16], "max_depth": 3},
        "budget": {"trials": 4, "steps_per_trial": 23},
        "parallel": 2,
    },
}


def test_the_best_network_loaded_and_served_is_as_accurate_as_the_search_says(cluster: Cluster, tmp_path: Path) -> None:
    search = orchestray.search(CONFIG, runs_dir=tmp_path)
    told = search.result["best"]
    run = orchestray.load_run(tmp_path / "networks" / "best")
    task, model = run.load_task(), run.load_model()
    batch = task.to_batch(task.dataset("validation"))
    targets = batch["targets"].numpy()
    with torch.no_grad():
        loaded = model.eval()(batch["inputs"]).argmax(1).numpy()
    served = load_served_model(search.path)
    answers = served.run([served.parse(sample.tolist()) for sample in batch["inputs"]])
    predicted = np.array([answer["outputs"].argmax() for answer in answers if not isinstance(answer, Exception)])

    right = told["objective"] * len(targets)  # a whole number of images
    assert abs(right - round(right)) < 1e-4
    assert (loaded == targets).sum() == (predicted == targets).sum() == round(right)
    assert run.result["final"]["validation"]["accuracy"] == told["objective"]
    assert sum(parameter.numel() for parameter in model.parameters()) == told["parameters"]
