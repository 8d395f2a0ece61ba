"""The task `images`: folders and tables, parts of images by seed, epoch and sample, a model without the data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch

from orchestray.platform.data.draws import SampleDraws
from orchestray.platform.data.source import Streamed, open_split
from orchestray.platform.errors import DataError, TaskError
from orchestray.trainers.tasks import images
from orchestray.trainers.tasks.images import Images
from support.pictures import CLASSES, folder_of_pictures, pixels_of, table_of_pictures
from support.training import furthest, train

PICTURES = 30


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "pictures.parquet"
    pq.write_table(table_of_pictures(PICTURES), path, row_group_size=10)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(folder_of_pictures(tmp_path / "pictures", PICTURES))


def rows_of(data: Any) -> pa.Table:
    return data.dataset.to_table() if isinstance(data, Streamed) else data


@pytest.mark.parametrize("kind", ["table", "folder"])
def test_images_become_batches_of_one_size(kind: str, request: Any) -> None:
    task = Images(request.getfixturevalue(kind), size=16)
    rows = rows_of(task.dataset("train"))
    batch = task.to_batch(rows)
    assert (batch["inputs"].shape, batch["inputs"].dtype) == ((len(rows), 3, 16, 16), torch.float32)
    assert -1 <= batch["inputs"].min() < batch["inputs"].max() <= 1
    assert task.classes == list(CLASSES)
    bright = batch["inputs"].mean(dim=(1, 2, 3))  # brighter by class
    assert bright[batch["targets"] == 0].max() < bright[batch["targets"] == 1].min()
    assert bright[batch["targets"] == 1].max() < bright[batch["targets"] == 2].min()
    assert task.build_model()(batch["inputs"]).shape == (len(rows), 3)


@pytest.mark.parametrize("kind", ["table", "folder"])
def test_each_image_is_in_one_of_the_two_parts(kind: str, request: Any) -> None:
    task = Images(request.getfixturevalue(kind), validation_fraction=0.2)
    parts = [rows_of(task.dataset(split))["image"].to_pylist() for split in ("train", "validation")]
    assert [len(part) for part in parts] == [24, 6]
    assert len(set(parts[0]) | set(parts[1])) == PICTURES
    assert rows_of(task.dataset("validation"))["image"].to_pylist() == parts[1]


@pytest.mark.parametrize("kind", ["table", "folder"])
def test_a_path_of_its_own_is_validated_whole(kind: str, request: Any) -> None:
    path = request.getfixturevalue(kind)
    task = Images(path, validation_path=path)
    assert [len(rows_of(task.dataset(split))) for split in ("train", "validation")] == [PICTURES] * 2


def test_an_image_of_the_size_asked_for_keeps_its_pixels(table: str) -> None:
    task, rows = Images(table, size=20), table_of_pictures(3)
    middle = np.stack([pixels_of(content)[:, :, 2:22] for content in rows["image"].to_pylist()])
    found = (task.to_batch(rows)["inputs"] + 1) * 127.5
    assert np.abs(found.numpy() - middle).max() < 1e-3


def test_a_large_table_is_streamed_in_small_windows(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_WINDOW_ROWS", 10)
    task: Any = Images(table, validation_fraction=0.3)
    source = open_split(task, "train")
    assert (source.num_rows, source.chunk_rows, source.window_rows) == (20, (10, 10), 10)
    assert open_split(task, "validation").num_rows == 10
    assert isinstance(task.dataset("train").dataset, ds.Dataset)


def test_a_random_part_depends_on_the_sample_and_lies_in_the_image(table: str) -> None:
    task, rows = Images(table, size=16), table_of_pictures(8)

    def changed(ids: Any, epoch: int = 0) -> torch.Tensor:
        return task.to_training_batch(rows.take(ids), SampleDraws(np.array(ids), seed=0, epoch=epoch))["inputs"]

    whole = changed(list(range(8)))
    assert torch.equal(changed([5, 2]), whole[[5, 2]])
    assert not any(torch.equal(a, b) for a, b in zip(changed(list(range(8)), epoch=1), whole, strict=True))
    assert (whole.amax((2, 3)) <= task.to_batch(rows)["inputs"].amax((2, 3)) + 0.8).all()
    plain = Images(table, size=16, change=False)
    assert torch.equal(
        plain.to_training_batch(rows, SampleDraws(np.arange(8), seed=0, epoch=0))["inputs"],
        plain.to_batch(rows)["inputs"],
    )


def test_training_is_the_same_with_any_number_of_workers(table: str) -> None:
    runs = [train(Images(table, size=16), data, batch_size=9, steps=4, batch_norm="synchronized") for data in (1, 2)]
    assert furthest(runs[0][0].after, runs[1][0].after) < 1e-12
    assert runs[0][0].steps[-1]["loss"] == pytest.approx(runs[1][0].steps[-1]["loss"], abs=1e-12)


def test_the_model_is_built_again_without_the_images(table: str) -> None:
    task = Images(table)
    again = Images("nowhere", **task.rebuild_arguments())
    assert again.build_model()(task.example_inputs().unsqueeze(0)).shape == (1, 3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"image": "photo"}, "there is no column 'photo' in .*it has image, label, number"),
        ({"model": "resnet18"}, "'resnet18' is a network of torchvision, which is not here"),
    ],
)
def test_what_cannot_be_is_refused(
    table: str, arguments: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    with pytest.raises(TaskError, match=sentence):
        Images(table, **arguments).build_model()


TORCHVISION = """
from torch import nn

def list_models(module):
    return ["resnet18", "resnet50", "vit_b_16", "googlenet"]

class Of(nn.Sequential):
    def forward(self, x):
        if self.size not in (None, x.shape[2]):
            raise AssertionError(f"Wrong image height! Expected {self.size} but got {x.shape[2]}!\\nAnd more.")
        found = super().forward(x)
        return (found, found) if self.is_double and self.training else found

def get_model(name, weights, num_classes, image_size=224, aux_logits=True, init_weights=None):
    net = Of(nn.Conv2d(3, 4, 9), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
    net.size, net.is_double = image_size if name == "vit_b_16" else None, name == "googlenet" and aux_logits
    return net
"""
"""A package with the traits of torchvision's networks: a least size, one size alone, several outputs in training."""


@pytest.fixture
def torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace torchvision by another package, and return the folder of that."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "site" / "torchvision"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "models.py").write_text(TORCHVISION)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


@pytest.mark.parametrize("model", ["resnet18", "vit_b_16", "googlenet"])
@pytest.mark.usefixtures("torchvision")
def test_a_network_of_torchvision_takes_images_of_the_size_and_returns_logits_in_training(model: str) -> None:
    network = Images("nowhere", size=32, model=model, classes=["a", "b"]).build_model()
    assert network.training
    assert network(torch.zeros(4, 3, 32, 32)).shape == (4, 2)
    assert all(int(count) == 1 for name, count in network.named_buffers() if name.endswith("tracked"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": "resnet19"}, r"torchvision has no network 'resnet19' for classification; did you mean 'resnet18'\?"),
        (
            {"model": "resnet50", "size": 8},
            r"task\.size: .*'resnet50' takes no images of 8 x 8 \(.*\): give another size",
        ),
    ],
)
@pytest.mark.usefixtures("torchvision")
def test_a_network_that_torchvision_cannot_give_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        Images("nowhere", classes=["a"], **arguments).build_model()


@pytest.mark.parametrize("error", ["RuntimeError", "OSError"])
def test_a_torchvision_that_was_built_for_another_torch_is_named(torchvision: Path, error: str) -> None:
    (torchvision / "models.py").write_text(f"raise {error}('operator torchvision::nms does not exist')")
    with pytest.raises(
        TaskError, match=r"does not fit torch \d.*::nms does not exist\): install both from the same index"
    ):
        Images("nowhere", model="resnet18", classes=["a"]).build_model()


def test_folders_that_are_no_classes_are_refused(folder: str, tmp_path: Path) -> None:
    other = folder_of_pictures(tmp_path / "other", 2)
    with pytest.raises(
        DataError, match=r"the folders in .*other are cat, dog; those in .* are \['cat', 'dog', 'eel'\]"
    ):
        Images(folder, validation_path=str(other)).dataset("validation")
