"""The task `mnist`, and files of the IDX format."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.errors import DataError
from orchestray.platform.task import TaskSource
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.tasks import build
from orchestray.trainers.tasks.idx import read_idx
from orchestray.trainers.tasks.mnist import Mnist
from support.training import train

CONFIG = Path(__file__).parents[4] / "configs/train/mnist.yaml"
CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array: np.ndarray) -> bytes:
    """Return an array as LeCun's page describes the format: big-endian, with its sizes before it."""
    code = CODES[array.dtype.str[1:]]
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, code, array.ndim]) + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


def written(folder: Path, *, is_compressed: bool = False, num_images: int = 40) -> Path:
    """Write bright squares on the left (class 0), in the middle (1) or on the right (2) of images of 6 x 9."""
    generator = np.random.default_rng(0)
    for prefix, count in (("train", num_images), ("t10k", 12)):
        labels = generator.integers(3, size=count).astype(np.uint8)
        images = generator.integers(60, size=(count, 6, 9)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[1:5, 3 * label : 3 * label + 3] = 255
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            content = idx(array)
            file = folder / (f"{name}.gz" if is_compressed else name)
            file.write_bytes(gzip.compress(content, mtime=0) if is_compressed else content)
    return folder


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 28, 28)])
def test_arrays_of_every_type_come_back(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) - (0 if kind == "u1" else 3), dtype=kind)
    (tmp_path / "a").write_bytes(idx(array))
    (tmp_path / "b").write_bytes(gzip.compress(idx(array)))
    for name in ("a", "b"):
        found = read_idx(tmp_path / name)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


def test_a_file_that_is_another_one_or_damaged_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    file, content = tmp_path / "labels", idx(np.arange(5, dtype=np.uint8))
    file.write_bytes(content)
    right = hashlib.sha256(content).hexdigest()
    assert list(read_idx(file, right.upper())) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match=f"labels is not the file that task.checksums names: its SHA-256 is {right}"):
        read_idx(file, "0" * 64)
    for damaged, text in (
        (content[:-1], r"damaged: 5 numbers need 5 bytes, and it has 4"),
        (content + b"x", r"need 5 bytes, and it has 6"),
        (content[:6], r"ends within its 1 sizes"),
        (b"P5 8 8", r"no IDX file: it begins with 50 35 20 38"),
        (b"", "begins with nothing"),
        (gzip.compress(content)[:-9], "is damaged"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=text):
            read_idx(file)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_idx(tmp_path / "nothing")


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_batch_has_the_images_from_0_to_1_and_their_labels(tmp_path: Path, is_compressed: bool) -> None:
    task = Mnist(str(written(tmp_path, is_compressed=is_compressed)))
    assert (task.dataset("train").num_rows, task.dataset("validation").num_rows) == (40, 12)
    batch = task.to_batch(task.dataset("train").slice(3, 5))
    assert batch["inputs"].shape == (5, 1, 6, 9)
    assert batch["inputs"].dtype == torch.float32
    suffix = ".gz" if is_compressed else ""
    images = read_idx(tmp_path / f"train-images-idx3-ubyte{suffix}")[3:8]
    assert np.array_equal((batch["inputs"][:, 0] * 255).round().numpy(), images)
    assert batch["targets"].tolist() == read_idx(tmp_path / f"train-labels-idx1-ubyte{suffix}")[3:8].tolist()


@pytest.mark.parametrize(("model", "hidden"), [("mlp", [16]), ("cnn", [4, 8])])
def test_it_learns_and_its_model_is_built_again_without_the_data(tmp_path: Path, model: str, hidden: list[int]) -> None:
    task = Mnist(str(written(tmp_path)), model=model, hidden=hidden)
    chosen: dict[str, Any] = {"optimizer": {"type": "adam", "lr": 0.02}, "precision": "float32", "steps": 30}
    run = train(task, **chosen)[0]
    assert run.outcome.final["validation"]["accuracy"] >= 0.9
    arguments = {"path": str(tmp_path / "gone"), "model": model, "hidden": hidden, **task.rebuild_arguments()}
    again = build(TaskSource("mnist", arguments)).build_model()
    again.load_state_dict(run.after)
    assert (
        task.encode(again.eval()(task.to_batch(task.dataset("validation").slice(0, 1))["inputs"])[0])["class"] in "012"
    )


def test_files_that_do_not_belong_together_and_a_folder_without_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train-images-idx3-ubyte in .*: set task\.path to the folder"):
        Mnist(str(tmp_path)).dataset("train")
    written(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(7, np.uint8)))
    with pytest.raises(
        DataError, match=r"do not belong together: the images have the sizes \[40, 6, 9\], the labels \[7\]"
    ):
        Mnist(str(tmp_path)).dataset("train")
    checked = Mnist(str(tmp_path), checksums={"train-labels-idx1-ubyte": "1" * 64})
    with pytest.raises(DataError, match=r"is not the file that task\.checksums names"):
        checked.dataset("train")


def test_the_shipped_files_are_of_ten_digits() -> None:
    config = load_train_config(CONFIG)
    task = build(TaskSource.from_config(config.task))
    assert task.dataset("train").num_rows == 480
    assert task.dataset("validation").num_rows == 120
    assert set(task.dataset("train")["label"].to_pylist()) == set(range(10))
    assert config.strategy.network.data == 1
