"""Inference on embedded/mobile devices: a small network in 8-bit integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.models import small_devices
from orchestray.serving.models.load import load_served_model
from orchestray.serving.models.quantize import Int8Linear, quantize_int8
from orchestray.serving.models.served import ServedModel
from orchestray.trainers.survey.lab.timing import quiet_profiler
from support.served import written_run


def test_a_small_net_in_int8_takes_a_quarter_of_the_bytes_and_is_as_accurate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, small = small_devices.measure_small_net(rounds=3)
    assert (whole.numbers, small.numbers) == ("float32", "int8")
    weights, rows = 64 * 128 + 128 * 128 + 128 * 10, 128 + 128 + 10
    assert (whole.num_bytes, small.num_bytes) == (4 * weights + 4 * rows, weights + 2 * 4 * rows)
    assert small.num_bytes < 0.28 * whole.num_bytes
    assert whole.accuracy > 0.9
    assert small.accuracy > whole.accuracy - 0.01
    timed: dict[str, str] = {}

    def given(ways: Mapping[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
        """Look at what is timed in each way, and say how long it takes."""
        for name, way in ways.items():
            with quiet_profiler() as seen:
                assert way().shape == (1, 10)
            timed[name] = " ".join(event.name for event in seen.events())
        return {"float32": [3.0, 1.0, 2.0], "int8": [7.0, 5.0, 6.0]}

    monkeypatch.setattr(small_devices, "times_s", given)
    assert [each.latency_s for each in small_devices.measure_small_net()] == [2.0, 6.0]
    assert ("_int_mm" in timed["int8"], "_int_mm" in timed["float32"]) == (True, False)


def test_an_answer_in_int8_is_the_same_bits_whoever_shares_its_batch() -> None:
    task, model = small_devices._trained()
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
    layer = Int8Linear(linear)
    assert layer.run_report() == {"bytes": 5 * 7 + 2 * 4 * 5, "bytes_before": 4 * (5 * 7 + 5)}
    given, wanted = layer(inputs), linear(inputs)
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
