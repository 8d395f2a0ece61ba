"""The task `digits`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import TaskError
from orchestray.trainers.parallel.tensor.branches import Branches
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
        (
            {"model": "inception", "hidden": [8, 6], "dropout": 0.1},
            (1, 8, 8),
            [nn.Conv2d, nn.ReLU, Branches, nn.MaxPool2d, Branches, nn.AvgPool2d, nn.Flatten, nn.Dropout, nn.Linear],
        ),
        (
            {"model": "alexnet", "hidden": [5], "dropout": 0.1},
            (1, 8, 8),
            [Branches, Branches, nn.Flatten, nn.Dropout, nn.Linear, nn.ReLU, nn.Linear],
        ),
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


@pytest.mark.parametrize("channels", [[4], [8, 9, 4, 5, 16]])
def test_the_inception_network_takes_any_depth_and_gives_each_branch_its_share(channels: list[int]) -> None:
    task = Digits(model="inception", hidden=channels)
    model = task.build_model()
    assert model(task.example_inputs()[None]).shape == (1, 10)
    for block, number in zip([m for m in model.modules() if isinstance(m, Branches)], channels, strict=True):
        widths = [branch[-2].out_channels for branch in block.branches]  # type: ignore[index,union-attr]
        assert sum(widths) == number
        assert max(widths) - min(widths) <= 1


def test_the_towers_of_alexnet_meet_where_the_papers_do() -> None:
    task = Digits(model="alexnet", hidden=[16, 16])
    model = task.build_model()
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    assert len(convolutions) == 2 * 5
    assert len([module for module in model.modules() if isinstance(module, nn.Linear)]) == 3
    seen = task.example_inputs()[None]
    for name, block in list(model.named_children())[:2]:
        inside = {n: module.weight for n, module in convolutions.items() if n.startswith(f"{name}.")}
        seen = block(seen)
        own = seen[:, : seen.shape[1] // 2].sum()  # the first tower's channels
        gradients = torch.autograd.grad(own, list(inside.values()), retain_graph=True)
        for inner, gradient in zip(inside, gradients, strict=True):
            assert bool(gradient.any()) == (".branches.0." in inner)
    first = convolutions["0.branches.1.0"].weight
    assert torch.autograd.grad(own, first)[0].any(), "its second half sees what the other tower made before"


def test_an_unknown_model_or_too_few_channels_are_refused() -> None:
    with pytest.raises(TaskError, match=r"task\.model must be 'mlp', 'cnn', 'inception' or 'alexnet', got 'rnn'"):
        Digits(model="rnn")
    with pytest.raises(TaskError, match=r"task\.hidden must have .* 4 at least .*, got \[8, 3\]"):
        Digits(model="inception", hidden=[8, 3])
    with pytest.raises(TaskError, match=r"task\.hidden"):
        Digits(model="inception", hidden=[])


@pytest.mark.parametrize(("model", "hidden", "rate"), [("inception", [16, 16], 0.005), ("alexnet", [64, 64], 0.002)])
def test_an_epoch_teaches_the_networks_of_branches_most_digits(model: str, hidden: list[int], rate: float) -> None:
    torch.manual_seed(0)
    task = Digits(model=model, hidden=hidden)
    network = task.build_model()
    optimizer = torch.optim.Adam(network.parameters(), rate)
    batch, validation = (task.to_batch(task.dataset(split)) for split in ("train", "validation"))
    for chosen in torch.randperm(len(batch["targets"])).split(16):
        part = {name: value[chosen] for name, value in batch.items()}
        optimizer.zero_grad()
        task.loss(network(part["inputs"]), part).backward()
        optimizer.step()
    with torch.no_grad():
        assert task.metrics(network(validation["inputs"]), validation)["accuracy"] > 0.5  # of ten classes
