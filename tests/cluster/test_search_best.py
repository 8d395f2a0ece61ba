"""Accuracy of a search's best network: its saved weights reach it, loaded, and served."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import orchestray
from orchestray.platform.cluster.cluster import Cluster
from orchestray.search.engine.session import SearchError
from orchestray.search.results.paths import SearchPaths
from orchestray.search.results.run import SearchRun
from orchestray.serving.models.load import load_served_model

CONFIG: dict[str, Any] = {
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
    assert_does_what_it_says(search)
    model = search.best.load_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == search.result["best"]["parameters"]


def test_networks_found_with_shared_weights_go_on_from_them_and_the_best_is_as_accurate_as_the_search_says(
    cluster: Cluster, tmp_path: Path
) -> None:
    quick = {"search_steps": 5, "controller_every": 3, "controller_steps": 1, "children": 2, "num_judged": 4}
    wanted = copy.deepcopy(CONFIG)
    wanted["search"] |= {
        "method": {"type": "enas", "finalists": 2, "inherit": True, **quick},
        "objective": {"metric": "accuracy"},
        "architecture": {"space": "cell", "nodes": 2, "channels": 4},
        "budget": {"trials": 3, "steps_per_trial": 4},
    }
    search = orchestray.search(wanted, runs_dir=tmp_path)
    lines = sorted(search.lines(), key=lambda line: line["trial"])
    assert [(line["trial"], line["parent"], line["status"], line["steps"]) for line in lines] == [
        (0, None, "succeeded", 5),
        (1, 0, "succeeded", 4),
        (2, 0, "succeeded", 4),
    ]
    assert search.result["best"]["objective"] == max(line["objective"] for line in lines)
    assert_does_what_it_says(search)


def assert_does_what_it_says(search: SearchRun) -> None:
    """Assert that the best weights, loaded and served, are right on validation data as often as the search reports."""
    told, run = search.result["best"], orchestray.load_run(search.path / "best")
    task, model = run.load_task(), run.load_model()
    batch = task.to_batch(task.dataset("validation"))
    targets = batch["targets"].numpy()
    with torch.no_grad():
        loaded = model.eval()(batch["inputs"]).argmax(1).numpy()
    served = load_served_model(search.path)
    answers = served.run([served.signature.parse(sample.tolist()) for sample in batch["inputs"]])
    predicted = np.array([answer["outputs"].argmax() for answer in answers if not isinstance(answer, Exception)])

    right = told["objective"] * len(targets)  # a whole number of images
    assert abs(right - round(right)) < 1e-4
    assert (loaded == targets).sum() == (predicted == targets).sum() == round(right)
    assert run.result["final"]["validation"]["accuracy"] == told["objective"]


def damaged(name: str, method: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bytes]:
    """Damage a search as a loss of power after its last trial does: the files of states are empty.

    Return its config, and the weights of its best.
    """
    config = {
        "name": name,
        "base": {
            "task": {"type": "support.tiny_task:TinyTask"},
            "train": {"batch_size": 8, "optimizer": {"type": "sgd", "lr": 0.1}},
        },
        "search": {
            "method": method,
            "objective": {"metric": "accuracy"},
            "space": {"train.optimizer.lr": {"type": "log_uniform", "low": 0.01, "high": 1.0}},
            "budget": {"trials": 2, "steps_per_trial": 8},
        },
    }
    orchestray.search(config, runs_dir=folder)
    weights = folder / name / "best" / "model" / "model.safetensors"
    before = weights.read_bytes()
    files = list(SearchPaths(folder / name).trial_states.iterdir())
    assert files
    for file in files:
        file.write_bytes(b"")
    shutil.rmtree(folder / name / "best")
    SearchPaths(folder / name).result.unlink()
    return config, before


def test_the_best_of_a_search_whose_states_are_damaged_is_trained_again_to_the_same(
    cluster: Cluster, tmp_path: Path
) -> None:
    config, before = damaged("random", {"type": "random"}, tmp_path)
    orchestray.search(config, runs_dir=tmp_path, resume=True)
    assert (tmp_path / "random" / "best" / "model" / "model.safetensors").read_bytes() == before


def test_of_a_population_whose_states_are_all_damaged_the_search_says_that_no_best_is_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    method = {"type": "population_based_training", "population": 2, "interval_steps": 4}
    config, _ = damaged("population", method, tmp_path)
    with pytest.raises(SearchError, match=r"2 trials have ended well.*lost or damaged.*trials\.jsonl"):
        orchestray.search(config, runs_dir=tmp_path, resume=True)
