"""A run made smaller: what is in its file, what it answers, and how accurate it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import orchestray
from orchestray.platform.errors import CheckpointError, ConfigError, RunNameError
from orchestray.platform.run.model_files import load_model_tensors
from orchestray.serving.models.load import load_served_model
from orchestray.serving.models.served import ServedModel
from orchestray.serving.sharded.partition import _stored
from orchestray.trainers.driver.compressed_run import Recipe, write_compressed
from orchestray.trainers.saved.initial_weights import with_initial_weights
from orchestray.trainers.saved.mlflow_export import export_to_mlflow
from orchestray.trainers.saved.run import Run, load_run
from support.trained_runs import train_here
from support.training import settings_for

CNN: dict[str, Any] = {
    "name": "cnn",
    "task": {"type": "digits", "model": "cnn", "hidden": [32, 64]},
    "train": {
        "batch_size": 64,
        "epochs": 6,
        "optimizer": {"type": "adamw", "lr": 0.003, "weight_decay": 0.01},
        "lr_schedule": {"type": "cosine", "warmup_steps": 20, "min_factor": 0.05},
    },
}
SMALL: dict[str, Any] = {
    "name": "small",
    "task": {"type": "digits", "hidden": [24]},
    "train": {"batch_size": 64, "epochs": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
}
DOREFA = {"type": "dorefa", "activation_bits": 8, "ends": "quantized"}
PARAMETER = "parametrizations.weight.original"
WEIGHTS = ("0.weight", "4.weight", "9.weight")


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_here(CNN, runs_dir=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def deep(cnn: Run) -> Run:
    """Return the network after Deep Compression as a whole."""
    recipe = Recipe(sparsity=0.87, bits=4, fine_tune_steps=120)
    return write_compressed(cnn, recipe, name="deep", runs_dir=cnn.path.parent, train_run=train_here)


@pytest.fixture
def small(tmp_path: Path) -> Run:
    return train_here(SMALL, runs_dir=tmp_path)


def test_deep_compression_is_twenty_times_smaller_on_disk_at_half_a_point(cnn: Run, deep: Run) -> None:
    before, after = cnn.path / "model" / "model.safetensors", deep.path / "model" / "model.huffman"
    assert before.stat().st_size >= 20 * after.stat().st_size
    accuracies = [float(run.result["final"]["validation"]["accuracy"]) for run in (cnn, deep)]
    assert accuracies[0] > 0.98
    assert accuracies[1] >= accuracies[0] - 0.005
    made = deep.result["compressed"]
    assert (made["bytes_before"], made["bytes"]) == (before.stat().st_size, after.stat().st_size)
    stages = {stage: metrics["accuracy"] for stage, metrics in made["validation"].items()}
    assert list(stages) == ["whole", "pruned", "pruned, trained", "shared", "coded"]
    assert stages["pruned"] < stages["pruned, trained"] - 0.1  # which training what is left has mended
    assert not (deep.path / "model" / "model.safetensors").exists()
    assert [each.name for each in cnn.path.parent.iterdir() if each.name.startswith(".")] == []


def test_an_eighth_of_the_weights_is_left_in_sixteen_values_a_tensor(deep: Run) -> None:
    tensors = load_model_tensors(deep.path / "model")
    assert sum(int(tensors[name].count_nonzero()) for name in WEIGHTS) == deep.result["compressed"]["weights_left"]
    total = sum(tensors[name].numel() for name in WEIGHTS)
    assert deep.result["compressed"]["weights_left"] == total - round(0.87 * total)
    assert all(len(torch.unique(tensors[name][tensors[name] != 0])) <= 16 for name in WEIGHTS)


def test_it_is_served_exported_and_trained_from_like_any_run(deep: Run, tmp_path: Path) -> None:
    model = deep.load_model()
    task = deep.load_task()
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        answers = model(batch["inputs"])
    right = float((answers.argmax(1) == batch["targets"]).double().mean())
    assert right == pytest.approx(float(deep.result["final"]["validation"]["accuracy"]), abs=1e-6)
    served = load_served_model(deep.path)
    assert isinstance(served, ServedModel)
    for answer, wanted in zip(
        served.run([{"inputs": each.numpy()} for each in batch["inputs"][:4]]), answers, strict=False
    ):
        assert np.allclose(answer["outputs"], wanted.numpy(), atol=1e-5)
    assert dict(_stored(deep.path / "model")).keys() == model.state_dict().keys()  # of what is served by parts
    exported = export_to_mlflow(deep, tmp_path / "mlruns").path
    assert list(exported.rglob("model.huffman"))
    started = (
        with_initial_weights(task, settings_for(init_from=str(deep.path), precision="float32").initial)
        .build_model()
        .state_dict()
    )
    assert all(torch.equal(started[name], each) for name, each in model.state_dict().items())


def test_without_fine_tuning_the_large_weights_are_those_of_the_run_by_clusters(small: Run) -> None:
    written = write_compressed(small, Recipe(sparsity=0.5, bits=8), name="b", runs_dir=small.path.parent)
    before, after = small.load_model().state_dict(), written.load_model().state_dict()
    for name in ("0.weight", "2.weight"):
        is_kept = after[name] != 0
        assert float((after[name] - before[name])[is_kept].abs().max()) < 0.01
        assert float(before[name][~is_kept].abs().max()) <= float(before[name][is_kept].abs().min()) + 1e-6
    assert torch.equal(after["0.bias"], before["0.bias"].half().float())
    assert (written.status, written.config.name) == ("succeeded", "b")


def test_tucker_factors_are_a_network_of_their_own_that_is_loaded_again(cnn: Run, tmp_path: Path) -> None:
    recipe = Recipe(sparsity=0.0, bits=8, tucker=0.75)
    written = write_compressed(cnn, recipe, name="tucker", runs_dir=tmp_path)
    shapes = {name: tuple(each.shape) for name, each in load_run(written.path).load_model().state_dict().items()}
    assert shapes["4.0.weight"] == (24, 32, 1, 1)
    assert shapes["4.1.weight"] == (48, 24, 3, 3)
    assert shapes["4.2.weight"] == (64, 48, 1, 1)
    assert shapes["0.weight"] == (32, 1, 3, 3)  # which factors would make larger
    assert written.config.task.type == "orchestray.trainers.shrink.tucker_task:TuckerTask"
    accuracies = [float(run.result["final"]["validation"]["accuracy"]) for run in (cnn, written)]
    assert accuracies[1] > accuracies[0] - 0.1
    stages = written.result["compressed"]["validation"]
    assert list(stages)[:3] == ["whole", "in factors", "pruned"]
    assert stages["in factors"]["loss"] != stages["whole"]["loss"]  # what the factors alone cost
    assert stages["in factors"]["accuracy"] > stages["whole"]["accuracy"] - 0.1
    again = write_compressed(written, Recipe(0.5, 8), name="again", runs_dir=tmp_path)
    assert set(again.load_model().state_dict()) == set(shapes)


@pytest.mark.parametrize(
    ("recipe", "wrong"),
    [
        (Recipe(sparsity=1.0), "--sparsity must be from 0 to below 1, got 1"),
        (Recipe(bits=9), "--bits must be 1 to 8, got 9"),
        (Recipe(tucker=0.0), "--tucker must be above 0 and at most 1, got 0"),
        (Recipe(fine_tune_steps=-1), "--fine-tune must be 0 or more, got -1"),
    ],
)
def test_a_number_out_of_range_is_refused(small: Run, recipe: Recipe, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        write_compressed(small, recipe, name="b", runs_dir=small.path.parent)


def test_what_cannot_be_made_smaller_leaves_nothing_behind(small: Run, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no convolution that has fewer weights"):
        write_compressed(small, Recipe(tucker=0.5), name="b", runs_dir=tmp_path)
    with pytest.raises(RunNameError, match="in use"):
        write_compressed(small, Recipe(), name="small", runs_dir=tmp_path)

    def fails(*_: object, **__: object) -> Run:
        raise CheckpointError("lost")

    with pytest.raises(CheckpointError, match="lost"):
        write_compressed(small, Recipe(fine_tune_steps=1), name="b", runs_dir=tmp_path, train_run=fails)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["small"]


@pytest.mark.parametrize("quantize", [{"type": "bnn"}, {"type": "twn"}, DOREFA])
def test_weights_of_few_bits_keep_their_values(tmp_path: Path, quantize: dict[str, Any]) -> None:
    run = train_here({**SMALL, "train": {**SMALL["train"], "quantize": quantize}}, runs_dir=tmp_path)
    written = orchestray.compress(run, sparsity=0.9, bits=1)
    images = torch.rand(20, 64, generator=torch.Generator().manual_seed(0))
    before, after = (each.load_model() for each in (run, written))
    for name in ("0.weight", "2.weight"):
        pair = [model.get_parameter(name.replace("weight", PARAMETER)) for model in (before, after)]
        layers = [model.get_submodule(name.partition(".")[0]) for model in (before, after)]
        assert len(torch.unique(pair[0])) > 200 > 4 > len(torch.unique(pair[1]))
        assert torch.allclose(layers[0].weight, layers[1].weight, rtol=1e-3, atol=0)  # they are in half precision
    assert torch.allclose(before(images), after(images), rtol=0.05, atol=0.05)
    assert written.result["compressed"]["bytes_before"] > 10 * written.result["compressed"]["bytes"]


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ({"optimizer": None, "solver": {"type": "hessian_free"}}, "take train.solver out"),
        ({"quantize": {"type": "twn"}}, "take train.quantize out"),
        ({"optimizer": {"type": "muon", "lr": 0.02}}, "muon moves a layer's weights by each other"),
    ],
)
def test_training_that_keeps_no_zeros_is_refused_before_anything_is_done(
    tmp_path: Path, train: dict[str, Any], why: str
) -> None:
    run = train_here({**SMALL, "train": {**SMALL["train"], **train}}, runs_dir=tmp_path)
    with pytest.raises(ConfigError, match=rf"--fine-tune cannot train this run; leave it out: .*{why}"):
        orchestray.compress(run, fine_tune=3)
    assert [each.name for each in tmp_path.iterdir()] == ["small"]


def test_from_python_the_new_run_stands_beside_the_run_or_where_it_is_wanted(small: Run, tmp_path: Path) -> None:
    written = orchestray.compress(small.path, sparsity=0.5, bits=3)
    assert (written.path, written.result["compressed"]["bits"]) == (tmp_path / "small-compressed", 3)
    elsewhere = orchestray.compress(small, name="b", runs_dir=tmp_path / "others")
    assert elsewhere.path == tmp_path / "others" / "b"
    assert elsewhere.result["compressed"]["sparsity"] == 0.9


def test_training_does_not_go_on_with_a_run_that_was_made_from_another(small: Run, tmp_path: Path) -> None:
    written = orchestray.compress(small, name="b")
    longer = {**SMALL, "name": "b", "train": {**SMALL["train"], "epochs": 2}}
    with pytest.raises(ConfigError, match=r"b was made from the run small \(compressed\).* set train\.init_from="):
        orchestray.train(longer, runs_dir=tmp_path, resume=True)
    assert load_run(written.path).result == written.result
    assert (written.path / "model" / "model.huffman").exists()


def test_fine_tuning_is_by_the_runs_own_training_without_its_ends(small: Run, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def noting(source: dict[str, Any], **where: Any) -> Run:
        asked.append(copy.deepcopy(source))
        return train_here(source, runs_dir=where["runs_dir"])

    write_compressed(small, Recipe(fine_tune_steps=3), name="b", runs_dir=tmp_path, train_run=noting)
    assert [each["train"]["init_keeps"] for each in asked] == ["zeros", "values"]
    assert [each["train"]["optimizer"]["lr"] for each in asked] == [0.1, pytest.approx(0.01)]
    assert all((each["train"]["steps"], each["train"]["epochs"]) == (3, None) for each in asked)
