"""The task `digits`."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import TaskError
from orchestray.trainers.tasks.digits import Digits


def test_the_images_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    wanted = load_digits()
    task = Digits()
    parts = [task.to_batch(task.dataset(split)) for split in ("train", "validation")]
    images = torch.cat([part["inputs"] for part in parts]).numpy()
    labels = torch.cat([part["targets"] for part in parts]).numpy()
    assert images.dtype == np.float32
    assert sorted(map(tuple, np.column_stack([images, labels]))) == sorted(
        map(tuple, np.column_stack([wanted.data / 16, wanted.target]).astype(np.float32))
    )


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_the_split_is_the_same_every_time_and_of_the_size_asked(fraction: float) -> None:
    first, again = (Digits(validation_fraction=fraction).dataset("validation") for _ in range(2))
    assert first.equals(again)
    assert first.num_rows == round(1797 * fraction)
    counts = np.bincount(first["label"].to_numpy(), minlength=10)
    assert counts.min() > 0.5 * counts.mean()  # all classes are in it


def test_reading_them_does_not_import_scikit_learn() -> None:
    code = (
        "import sys\nfrom orchestray.trainers.tasks.digits import Digits\nDigits().dataset('train')\n"
        "print('sklearn' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_inputs_share_the_memory_of_the_column() -> None:
    task = Digits()
    table = task.dataset("train")
    assert task.to_batch(table)["inputs"].data_ptr() == to_tensor(table["image"]).data_ptr()


@pytest.mark.parametrize(
    ("arguments", "shape", "kinds"),
    [
        ({"hidden": [5, 6]}, (64,), [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]),
        ({"hidden": [5], "batch_norm": True}, (64,), [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]),
        ({"hidden": [5], "dropout": 0.1}, (64,), [nn.Linear, nn.ReLU, nn.Dropout, nn.Linear]),
        (
            {"model": "cnn", "hidden": [4]},
            (1, 8, 8),
            [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Linear],
        ),
        ({"hidden": []}, (64,), [nn.Linear]),
    ],
)
def test_models_are_flat_sequences_from_images_to_ten_logits(
    arguments: dict[str, object], shape: tuple[int, ...], kinds: list[type]
) -> None:
    task = Digits(**arguments)  # type: ignore[arg-type]
    model = task.build_model()
    assert [type(layer) for layer in model.children()] == kinds
    batch = task.to_batch(task.dataset("validation").slice(0, 7))
    assert batch["inputs"].shape == (7, *shape)
    assert task.example_inputs().shape == shape
    outputs = model(batch["inputs"])
    assert outputs.shape == (7, 10)
    assert task.loss(outputs, batch).shape == ()
    assert 0 <= float(task.metrics(outputs, batch)["accuracy"]) <= 1


@pytest.mark.parametrize("channels", [[4], [4, 4], [4, 4, 4, 4]])
def test_the_convolutional_network_takes_any_depth(channels: list[int]) -> None:
    task = Digits(model="cnn", hidden=channels, dropout=0.1)
    assert task.build_model()(task.example_inputs()[None].expand(2, -1, -1, -1)).shape == (2, 10)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(TaskError, match=r"task\.model must be 'mlp' or 'cnn', got 'rnn'"):
        Digits(model="rnn")
