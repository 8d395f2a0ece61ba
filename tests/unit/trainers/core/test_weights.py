"""Weights as named tensors, and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestray.platform.errors import CheckpointError
from orchestray.trainers.core.weights import convert, load_model_tensors, model_tensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = nn.Parameter(torch.randn(4, 2).t())
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("also_empty", torch.zeros(0))


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 3


def test_a_tied_weight_is_there_once_under_the_first_of_its_names() -> None:
    tensors = model_tensors(Tied())
    assert list(tensors) == [
        "turned", "empty", "also_empty", "embedding.weight", "norm.weight", "norm.bias", "norm.running_mean",
        "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors.values())


def test_weights_round_trip_bit_for_bit_and_keep_the_tie() -> None:
    saved, fresh = Tied(), Tied()
    with torch.no_grad():
        saved.norm.running_mean.normal_()  # type: ignore[union-attr]
        saved.norm.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
    load_model_tensors(fresh, {name: tensor.clone() for name, tensor in model_tensors(saved).items()})
    for name, value in saved.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    assert fresh.head.weight is fresh.embedding.weight
    assert not fresh.turned.is_contiguous()


def test_a_tied_weight_loads_under_any_of_its_names() -> None:
    saved, fresh = Tied(), Tied()
    tensors = model_tensors(saved)
    tensors["head.weight"] = tensors.pop("embedding.weight")
    load_model_tensors(fresh, tensors)
    assert torch.equal(fresh.embedding.weight, saved.embedding.weight)


def test_floats_are_converted_between_precisions() -> None:
    model = nn.Linear(2, 2)
    load_model_tensors(model, {name: t.double() for name, t in model_tensors(nn.Linear(2, 2)).items()})
    assert model.weight.dtype == torch.float32


def test_a_converted_model_keeps_its_imaginary_parts_and_its_ties() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.cfloat), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].bias = model[2].bias
    before = model[0].weight.detach().clone()
    assert convert(model, torch.float64) is model
    assert torch.equal(model[0].weight, before.to(torch.complex128))
    assert model[1].bias is model[2].bias
    assert model[2].running_mean.dtype == torch.float64
    assert model[2].num_batches_tracked.dtype == torch.int64
    convert(model, torch.bfloat16)
    assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.complex128, torch.bfloat16)


def test_what_does_not_fit_is_named_all_at_once_and_the_model_stays_as_it_was() -> None:
    model = nn.Linear(2, 3)
    before = model.weight.clone()
    with pytest.raises(CheckpointError) as caught:
        load_model_tensors(model, {"weight": torch.zeros(3, 3), "other": torch.zeros(1)})
    text = str(caught.value)
    assert "missing: bias" in text
    assert "not in the model: other" in text
    assert "weight is float32 [3, 3], the model's is float32 [3, 2]" in text
    assert torch.equal(model.weight, before)
    with pytest.raises(CheckpointError, match=r"bias is int64 \[3\]"):
        load_model_tensors(model, {"weight": before, "bias": torch.zeros(3, dtype=torch.int64)})


def test_state_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'_extra_state' of type int"):
        model_tensors(Extra(1, 1))
