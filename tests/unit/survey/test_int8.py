"""Inference on embedded/mobile devices: a small network in 8-bit integers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.models.load import load_served_model
from orchestray.serving.models.quantize import Int8Linear, num_bytes, quantize_int8
from orchestray.serving.models.served import ServedModel
from orchestray.trainers.tasks.digits import Digits
from support.served import written_run


def trained_digits() -> tuple[Digits, nn.Module]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    task = Digits(hidden=[128, 128])
    model, batch = task.build_model(), task.to_batch(task.dataset("train"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(model(batch["inputs"]), batch).backward()
        optimizer.step()
    return task, model.eval()


def test_a_small_net_in_int8_takes_a_quarter_of_the_bytes_and_is_as_accurate(
    record_property: pytest.RecordProperty,
) -> None:
    task, model = trained_digits()
    batch = task.to_batch(task.dataset("validation"))

    def accuracy_and_ms() -> tuple[float, float]:
        with torch.inference_mode():
            accuracy = float(task.metrics(model(batch["inputs"]), batch)["accuracy"])
            started_s = time.perf_counter()
            for row in range(50):
                model(batch["inputs"][row : row + 1])
            return accuracy, (time.perf_counter() - started_s) / 50 * 1e3

    bytes_before, (accuracy_before, ms_before) = num_bytes(model), accuracy_and_ms()
    quantize_int8(model)
    bytes_after, (accuracy_after, ms_after) = num_bytes(model), accuracy_and_ms()
    record_property("bytes", (bytes_before, bytes_after))
    record_property("latency_ms", (ms_before, ms_after))  # reported, not judged
    record_property("accuracy", (accuracy_before, accuracy_after))
    record_property("accuracy_drop", accuracy_before - accuracy_after)  # of samples it was not trained on
    weights, rows = 64 * 128 + 128 * 128 + 128 * 10, 128 + 128 + 10
    assert (bytes_before, bytes_after) == (4 * weights + 4 * rows, weights + 2 * 4 * rows)
    assert bytes_after < 0.28 * bytes_before
    assert accuracy_before > 0.9
    assert accuracy_after > accuracy_before - 0.01


def test_an_answer_in_int8_is_the_same_bits_whoever_shares_its_batch() -> None:
    task, model = trained_digits()
    inputs = task.to_batch(task.dataset("validation"))["inputs"][:32].clone()
    inputs[1] *= 1000  # a scale for the whole batch would drown the others
    served = ServedModel(quantize_int8(model), inputs[0])
    samples = [served.signature.parse(row.numpy()) for row in inputs]
    together = served.run(samples)
    for sample, answer in zip(samples, together, strict=True):
        (alone,) = served.run([sample])
        assert isinstance(alone, dict)
        assert isinstance(answer, dict)
        assert (alone["outputs"] == answer["outputs"]).all()


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (0, 7)])
def test_an_integer_layer_answers_as_the_layer_within_its_rounding(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    linear, inputs = nn.Linear(7, 5), torch.randn(shape)
    given, wanted = Int8Linear(linear)(inputs), linear(inputs)
    assert given.shape == wanted.shape
    most = inputs.abs().amax(-1, keepdim=True) if inputs.numel() else torch.zeros(*shape[:-1], 1)
    # Half a step of either factor, times the largest of the other, for each of the 7 products.
    bound = 7 * 2 * (0.51 / 127) * most * linear.weight.abs().amax(-1)
    assert ((given - wanted).abs() <= bound + 1e-6).all()


def test_rows_of_zeros_give_the_bias() -> None:
    linear = nn.Linear(4, 3)
    assert torch.equal(Int8Linear(linear)(torch.zeros(2, 4)), linear.bias.detach().expand(2, 3))


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no linear layer"):
        quantize_int8(nn.Sequential(nn.Conv2d(1, 1, 3)))


def test_layers_that_share_their_weights_keep_them() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 5))
    model[1].weight = model[0].weight
    quantize_int8(model)
    assert type(model[1]) is nn.Linear
    assert isinstance(model[2], Int8Linear)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["resources.gpus_per_worker=1"], "compute.quantize: is for the CPU"),
        (["compute.network={pipeline: 2}"], "compute.quantize: is for models in one process"),
        (["compute.compile=true"], "compute.quantize: does not go with compute.compile"),
        (["compute.quantize=int4"], "compute.quantize: must be"),
    ],
)
def test_what_does_not_go_with_int8_is_refused(overrides: list[str], told: str) -> None:
    config = {"name": "e", "models": [{"name": "digits", "run": "runs/digits"}]}
    with pytest.raises(ConfigError, match=told):
        load_serve_config(config, ["compute.quantize=int8", *overrides], look_at_files=False)


def test_a_run_is_served_in_int8(tmp_path: Path) -> None:
    run = written_run(tmp_path)
    exact, served = load_served_model(run), load_served_model(run, quantize="int8")
    (wanted,), (given,) = (model.run([model.signature.parse(model.signature.example)]) for model in (exact, served))
    assert isinstance(wanted, dict)
    assert isinstance(given, dict)
    assert abs(wanted["outputs"] - given["outputs"]).max() < 0.02
    assert not (wanted["outputs"] == given["outputs"]).all()
