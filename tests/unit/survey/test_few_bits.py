"""Networks of few bits (group E of the survey): the values that weights and gradients take, and accuracy on digits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.core.rng import RngKey, seed_modules
from orchestray.trainers.core.weights import load_model_tensors
from support.few_bits import quantized_digits
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.training import digits

STEPS = 150


def float_digits() -> Any:
    return digits(hidden=[128, 128], batch_norm=True)


@cache
def trained(kind: str | None, steps: int = STEPS, **keys: Any) -> LaidOut:
    """Train on the digits, in floating-point numbers if `kind` is None."""
    task = float_digits if kind is None else quantized_digits(kind, task=float_digits, **keys)
    train = {"precision": "float32", "batch_size": 64, "optimizer": {"type": "adam", "lr": 0.003}}
    return train_laid_out(task, layout_settings({"microbatches": 1}, steps=steps, validate_every_steps=steps, **train))


def accuracy(kind: str | None, **keys: Any) -> float:
    return float((trained(kind, **keys).outcome.final["validation"] or {})["accuracy"])


def model_of(kind: str, **keys: Any) -> nn.Module:
    """Return the trained model, as it is served."""
    model = quantized_digits(kind, task=float_digits, **keys)().build_model()
    load_model_tensors(model, trained(kind, **keys).weights)
    return model.eval()


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def test_all_weights_and_hidden_inputs_of_a_binarized_network_are_one_or_minus_one(
    record_property: pytest.RecordProperty,
) -> None:
    model = model_of("bnn")
    taken: list[Tensor] = []
    for layer in layers_of(model):
        assert set(layer.weight.unique().tolist()) == {-1.0, 1.0}
        assert layer.parametrizations.weight[0].run_report() == {"values": 2}
        assert float(layer.parametrizations.weight.original.detach().abs().max()) <= 1
        layer.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    batch = float_digits().to_batch(float_digits().dataset("validation"))
    model(batch["inputs"])
    data, *hidden = taken
    assert torch.equal(data, batch["inputs"])
    assert [set(each.unique().tolist()) for each in hidden] == [{-1.0, 1.0}] * 2
    record_property("accuracy", (accuracy("bnn"), accuracy(None)))
    assert accuracy("bnn") > 0.88
    assert accuracy("bnn", ends="float") > accuracy(None) - 0.04


def test_weights_of_a_ternary_network_are_the_closed_form_of_the_real_ones_and_as_accurate(
    record_property: pytest.RecordProperty,
) -> None:
    for layer in layers_of(model_of("twn")):
        real = layer.parametrizations.weight.original.detach().double()
        threshold = 0.7 * real.abs().mean()
        scale = real.abs()[real.abs() > threshold].mean()
        values = layer.weight.detach().double().unique()
        assert torch.allclose(values, torch.stack([-scale, torch.zeros_like(scale), scale]), rtol=1e-6, atol=0)
        assert torch.equal(layer.weight == 0, real.abs() <= threshold)
        assert layer.parametrizations.weight[0].run_report() == {"values": 3}
    record_property("accuracy", (accuracy("twn"), accuracy(None)))
    assert accuracy("twn") > accuracy(None) - 0.03


def test_dorefa_trains_with_binary_weights_and_ternary_gradients(record_property: pytest.RecordProperty) -> None:
    keys = {"ends": "quantized", "gradient_bits": "ternary", "activation_bits": 2}
    model = model_of("dorefa", **keys).train()
    seed_modules(model, RngKey(), torch.device("cpu"))
    seen: list[Tensor] = []
    for layer in layers_of(model):
        mean = float(layer.parametrizations.weight.original.detach().abs().mean())
        assert layer.weight.unique().tolist() == pytest.approx([-mean, mean])
        layer.register_forward_hook(lambda _, __, outputs: outputs.register_hook(seen.append) and None)
    task = float_digits()
    batch = task.to_batch(task.dataset("train").slice(0, 64))
    task.loss(model(batch["inputs"]), batch).backward()
    assert len(seen) == 3
    for gradient in seen:
        largest = gradient.abs().amax(1, keepdim=True)
        codes = (gradient / largest.clamp_min(1e-30)).unique().tolist()
        assert codes == [-1.0, 0.0, 1.0]
    record_property("accuracy", (accuracy("dorefa", **keys), accuracy("dorefa"), accuracy(None)))
    assert accuracy("dorefa", **keys) > 0.92
    assert accuracy("dorefa") > accuracy(None) - 0.03  # weights of 1, inputs of 2, gradients of 6 bits


def test_flexpoint_overflows_no_more_once_warm_halves_the_bytes_and_is_as_accurate(
    record_property: pytest.RecordProperty,
) -> None:
    overflows = [
        {name: int(value) for name, value in trained("flexpoint", steps).weights.items() if "overflows" in name}
        for steps in (20, STEPS)
    ]
    assert len(overflows[0]) == 9  # weights, inputs and gradients of three layers
    assert overflows[0] == overflows[1]
    for layer in layers_of(model_of("flexpoint")):
        real = layer.parametrizations.weight.original.detach()
        mantissas, exponent = layer.parametrizations.weight[0].pack(real)
        assert torch.equal(mantissas.float() * 2.0**exponent, layer.weight)
        assert float((layer.weight.detach() - real).abs().max()) <= 2.0**exponent / 2
        assert mantissas.nbytes + 1 <= 0.51 * real.nbytes  # the exponent is a byte
        assert len(mantissas.unique()) > 400
    record_property("accuracy", (accuracy("flexpoint"), accuracy(None)))
    assert accuracy("flexpoint") > accuracy(None) - 0.01
