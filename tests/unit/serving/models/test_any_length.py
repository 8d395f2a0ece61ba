"""Samples of any length in one batch: each is answered as it is alone, in few forward passes."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import CheckpointError
from orchestray.serving.models.errors import InputError
from orchestray.serving.models.padding import Padding
from orchestray.serving.models.served import ServedModel

LENGTHS = [3, 12, 5, 1, 30, 12, 9, 16]


class Words(nn.Module):
    """Means of embeddings, and one value for each word; counts its forward passes."""

    def __init__(self, *, heeds_mask: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(50, 4)
        self.heeds_mask = heeds_mask
        self.sizes: list[tuple[int, int]] = []

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        self.sizes.append((ids.shape[0], ids.shape[1]))
        found = self.embedding(ids)
        seen = torch.ones_like(ids) if mask is None or not self.heeds_mask else mask
        mean = (found * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)
        return {"mean": mean, "each": found.sum(2) + mean[:, :1]}


def served(model: nn.Module, *, mask: bool = True, **more: Any) -> ServedModel:
    example = {"ids": torch.ones(20, dtype=torch.int64)}
    values = {"ids": 7.0}
    if mask:
        example["mask"], values["mask"] = torch.ones(20, dtype=torch.int64), 0.0
    return ServedModel(model, example, padding=Padding(values, "mask" if mask else None, 30), **more)


def samples_of(model: ServedModel) -> list[Any]:
    rng = np.random.default_rng(0)
    given = [rng.integers(50, size=length).tolist() for length in LENGTHS]
    several = len(model.signature.inputs) > 1
    return [model.signature.parse({"ids": ids} if several else ids) for ids in given]


@pytest.mark.parametrize(
    ("heeds", "mask", "pads", "passes"),
    [
        (True, True, False, [(4, 16), (3, 5), (1, 30)]),
        (True, True, True, [(4, 16), (4, 8), (1, 30)]),
        (True, False, False, [(1, 3), (2, 12), (1, 5), (1, 1), (1, 30), (1, 9), (1, 16)]),
        (False, True, False, [(1, 3), (2, 12), (1, 5), (1, 1), (1, 30), (1, 9), (1, 16)]),
    ],
    ids=["mask", "mask, a few sizes", "no mask", "a mask without effect"],
)
def test_each_sample_is_answered_as_alone_in_few_passes(
    heeds: bool, mask: bool, pads: bool, passes: list[tuple[int, int]]
) -> None:
    module = Words(heeds_mask=heeds)
    model = served(module, mask=mask, pad_to=(1, 2, 4, 8) if pads else ())
    samples = samples_of(model)
    module.sizes.clear()
    answers = model.run(samples)
    assert sorted(module.sizes) == sorted(passes)
    for answer, sample in zip(answers, samples, strict=True):
        assert isinstance(answer, dict)
        with torch.no_grad():
            alone = module(torch.tensor(sample["ids"])[None])
        for name in ("mean", "each"):
            np.testing.assert_allclose(answer[name], alone[name][0], atol=1e-5)


class Halved(nn.Module):
    """A convolution whose output is half as long as its input, or twice as long."""

    def __init__(self, *, up: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.ConvTranspose1d(1, 1, 2, stride=2) if up else nn.Conv1d(1, 1, 3, stride=2, padding=1)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        found: Tensor = self.layer((ids if mask is None else ids * mask).float()[:, None])[:, 0]
        return found


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("up", [True, False])
def test_outputs_of_another_length_than_the_inputs_are_answered_whole(up: bool, mask: bool) -> None:
    module = Halved(up=up)
    model = served(module, mask=mask)
    samples = samples_of(model)
    for answer, sample in zip(model.run(samples), samples, strict=True):
        assert isinstance(answer, dict)
        with torch.no_grad():
            np.testing.assert_allclose(answer["outputs"], module(torch.tensor(sample["ids"])[None])[0], atol=1e-5)


def test_a_mask_without_effect_is_named_and_none_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "orchestray.serving"):
        served(Words())
        assert caplog.text == ""
        served(Words(heeds_mask=False))
    assert "though it takes the mask mask" in caplog.text


def test_the_signature_says_which_dimensions_have_any_length_and_travels() -> None:
    signature = served(Words()).signature
    shapes = {spec.name: spec.shape for spec in (*signature.inputs, *signature.outputs)}
    assert shapes == {"ids": (None,), "mask": (None,), "mean": (4,), "each": (None,)}
    assert str(signature.inputs[0]) == "int64 of shape [any]"
    assert pickle.loads(pickle.dumps(signature)) == signature  # noqa: S301


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        ({"ids": []}, "inputs.ids: wanted int64 of shape .any."),
        ({"ids": [[1]]}, "inputs.ids"),
        ({"ids": [1, 2], "mask": [1]}, "inputs.mask: wanted the length of ids, 2, got 1"),
        ({"ids": [1] * 31}, "inputs: wanted a length of 30 at most, got 31"),
        ({"mask": [1]}, "inputs.ids: wanted int64 of shape .any., got nothing"),
    ],
)
def test_lengths_that_do_not_go_are_refused(sample: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        served(Words()).signature.parse(sample)


def test_a_mask_is_that_of_the_whole_sample_unless_it_is_given() -> None:
    model = served(Words())
    assert model.signature.parse({"ids": [1, 2, 3]})["mask"].tolist() == [1, 1, 1]
    assert model.signature.parse({"ids": [1, 2, 3], "mask": [1, 0, 1]})["mask"].tolist() == [1, 0, 1]


def test_padding_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="it does not answer one of 2"):
        ServedModel(nn.Linear(4, 2), torch.ones(4), padding=Padding({"inputs": 0.0}))
    for padding in (Padding({"other": 0.0}), Padding({"inputs": 0.0}, "mask")):
        with pytest.raises(CheckpointError, match=r"must map names of inputs .*\(inputs\)"):
            ServedModel(nn.Identity(), torch.ones(4), padding=padding)
