"""A batch is answered as its samples would be alone, and one sample's error is its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import CheckpointError
from orchestray.serving.models import InputError, ModelError
from orchestray.serving.models.padding import padded_size, padded_sizes
from orchestray.serving.models.served import ServedModel
from support.served import served_linear


class Picky(nn.Module):
    """A model that raises on a batch with a negative number, and records the sizes it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.sizes.append(len(inputs))
        if (inputs < 0).any():
            raise ValueError("negative")
        return inputs * 2


class Halves(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / 2


def samples_of(model: ServedModel, count: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    return [model.signature.parse(generator.normal(size=4).astype(np.float32)) for _ in range(count)]


@pytest.mark.parametrize("pad_to", [(), (1, 2, 4, 8)])
def test_the_answers_of_a_batch_are_those_of_its_samples_alone(pad_to: tuple[int, ...]) -> None:
    model = served_linear(pad_to=pad_to)
    samples = samples_of(model, 5)
    together = model.run(samples)
    for sample, answer in zip(samples, together, strict=True):
        (alone,) = model.run([sample])
        assert isinstance(answer, dict)
        assert isinstance(alone, dict)
        np.testing.assert_allclose(answer["outputs"], alone["outputs"], atol=1e-6)


def test_answers_are_the_same_bits_whoever_shares_the_batch_where_all_are_padded_to_one_size() -> None:
    model = served_linear(pad_to=(8,))
    samples = samples_of(model, 8)
    together = model.run(samples)
    for count in range(1, 8):
        for answer, whole in zip(model.run(samples[:count]), together[:count], strict=True):
            assert isinstance(answer, dict)
            assert isinstance(whole, dict)
            np.testing.assert_array_equal(answer["outputs"], whole["outputs"])


def test_bad_samples_fail_alone_and_the_others_are_answered() -> None:
    model = ServedModel(Picky(), torch.zeros(2))
    answers = model.run([model.signature.parse([value, 1]) for value in (1, -1, 3, -4, 5)])
    assert [isinstance(answer, ModelError) for answer in answers] == [False, True, False, True, False]
    assert [answer["outputs"].tolist() for answer in answers if isinstance(answer, dict)] == [[2, 2], [6, 2], [10, 2]]


def test_batches_are_padded_to_the_sizes_given_and_no_other() -> None:
    picky = Picky()
    model = ServedModel(picky, torch.zeros(2), pad_to=padded_sizes(6))
    picky.sizes.clear()
    for count in range(1, 7):
        assert len(model.run([model.signature.parse([1, 1])] * count)) == count
    assert picky.sizes == [1, 2, 4, 4, 6, 6]


def test_every_size_of_every_model_is_compiled_before_the_first_request_and_no_other_is() -> None:
    def num_graphs() -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    sizes, plain, before = padded_sizes(16), Halves(), num_graphs()
    with torch._dynamo.config.patch(recompile_limit=3):  # where torch by itself would stop
        for _ in range(2):  # two versions of a model: the same function
            model = ServedModel(Halves(), torch.zeros(4), compile="eager", pad_to=sizes)
            model.warm_up(16)
            assert num_graphs() - before == len(sizes) > 3
            for count in (1, 3, 12):
                samples = samples_of(model, count)
                for sample, answer in zip(samples, model.run(samples), strict=True):
                    assert isinstance(answer, dict)
                    np.testing.assert_array_equal(answer["outputs"], plain(torch.from_numpy(sample["inputs"])))
            assert num_graphs() - before == len(sizes)
            before = num_graphs()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile makes C++ of a model, for a compiler")
def test_a_model_that_is_compiled_to_machine_code_answers_as_it_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    # Each takes longer than the kernel itself: a header made for further ones, and a trial of each vector extension.
    with config.patch({"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}):
        model = ServedModel(plain, torch.zeros(4), compile=True, pad_to=(4,))
        model.warm_up(4)
    assert list(tmp_path.rglob("*.cpp"))
    samples = samples_of(model, 3)
    with torch.no_grad():
        wanted = plain(torch.from_numpy(np.stack([sample["inputs"] for sample in samples]))).numpy()
    for answer, expected in zip(model.run(samples), wanted, strict=True):
        assert isinstance(answer, dict)
        np.testing.assert_allclose(answer["outputs"], expected, rtol=1e-5, atol=1e-6)


def test_padded_sizes_are_few_and_at_most_double_a_batch() -> None:
    for most in range(1, 200):
        sizes = padded_sizes(most)
        assert sizes[-1] == most
        assert len(sizes) <= most.bit_length() + 1
        assert all(count <= padded_size(count, sizes) < 2 * count + 1 for count in range(1, most + 1))


def test_sizes_that_are_given_are_used_in_order_with_the_largest_batch_as_the_last() -> None:
    assert padded_sizes(32, 1, [24, 4, 4, 64]) == (4, 24, 32)
    assert padded_sizes(30, 8, [16]) == (16, 32)


def test_several_outputs_have_names() -> None:
    class Two(nn.Module):
        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"sum": inputs.sum(dim=1), "double": inputs.double() * 2}

    model = ServedModel(Two(), torch.zeros(3))
    assert [(spec.name, spec.dtype, spec.shape) for spec in model.signature.outputs] == [
        ("sum", "float32", ()),
        ("double", "float64", (3,)),
    ]
    (answer,) = model.run([model.signature.parse([1, 2, 3])])
    assert isinstance(answer, dict)
    assert {name: array.tolist() for name, array in answer.items()} == {"sum": 6.0, "double": [2.0, 4.0, 6.0]}


def test_a_model_whose_outputs_do_not_count_the_samples_is_refused_before_it_serves() -> None:
    class Mean(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.mean()

    with pytest.raises((CheckpointError, ModelError), match="must count the samples"):
        ServedModel(Mean(), torch.zeros(3))


def test_a_model_in_double_precision_takes_and_gives_doubles() -> None:
    model = ServedModel(nn.Linear(4, 3).double(), torch.zeros(4))
    assert (model.signature.inputs[0].dtype, model.signature.outputs[0].dtype) == ("float64", "float64")


def test_a_model_whose_weights_are_bfloat16_takes_and_gives_float32() -> None:
    linear = nn.Linear(4, 3).bfloat16()
    model = ServedModel(linear, torch.zeros(4))
    assert (model.signature.inputs[0].dtype, model.signature.outputs[0].dtype) == ("float32", "float32")
    (answer,) = model.run([model.signature.parse([0.5, -1, 2, 0.25])])
    assert isinstance(answer, dict)
    wanted = linear(torch.tensor([[0.5, -1, 2, 0.25]]).bfloat16())[0].float()
    assert answer["outputs"].tolist() == wanted.tolist()


def test_bfloat16_answers_in_float32_near_the_full_precision() -> None:
    exact, rough = served_linear(), served_linear(precision="bfloat16")
    sample = exact.signature.parse([0.5, -1, 2, 0.25])
    (wanted,), (got,) = exact.run([sample]), rough.run([sample])
    assert isinstance(wanted, dict)
    assert isinstance(got, dict)
    assert got["outputs"].dtype == np.float32
    np.testing.assert_allclose(got["outputs"], wanted["outputs"], rtol=0.05, atol=0.05)


def test_answers_stay_what_they_are_when_a_model_writes_its_next_batch_to_the_memory_of_the_last() -> None:
    class Reuses(nn.Module):
        memory = torch.zeros(2, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.memory[: len(inputs)].copy_(inputs)

    model = ServedModel(Reuses(), torch.zeros(3))
    (first,), (second,) = (model.run([model.signature.parse([value] * 3)]) for value in (1.0, 2.0))
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["outputs"].tolist(), second["outputs"].tolist()) == ([1.0] * 3, [2.0] * 3)


@pytest.mark.parametrize(
    "form",
    [
        lambda y: torch.complex(y, -y).conj().imag,  # whose sign is a flag of the tensor
        lambda y: y.to_sparse(),
        lambda y: y.to(torch.float8_e5m2),
    ],
)
def test_tensors_that_numpy_cannot_hold_are_answered_by_their_values(form: Callable[[Tensor], Tensor]) -> None:
    class Formed(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return form(inputs)

    model = ServedModel(Formed(), torch.zeros(2))
    (answer,) = model.run([model.signature.parse([1.0, 2.0])])
    assert isinstance(answer, dict)
    assert answer["outputs"].tolist() == [1.0, 2.0]


class Called(nn.Module):
    """A model that is a function, and has layers of its own."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs, *self.layers)


@pytest.mark.parametrize(
    ("model", "mixes"),
    [
        (Called(lambda x, lstm: lstm(x)[0], nn.LSTM(3, 2)), True),
        (nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0), True),
        (nn.BatchNorm1d(2, track_running_stats=False), True),
        (Called(lambda x: x / x.abs().max()), True),
        (Called(lambda x, lstm: lstm(x)[0], nn.LSTM(3, 2, batch_first=True)), False),
        (nn.BatchNorm1d(2), False),
        (Called(lambda x: x + torch.rand_like(x)), False),
        (Called(lambda x: x.log()), False),
    ],
)
def test_a_model_that_mixes_the_samples_of_a_batch_is_told_when_it_is_loaded(
    model: nn.Module, mixes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ServedModel(model, torch.zeros(2, 3)).warm_up(1)
    assert caplog.text == ""
    ServedModel(model, torch.zeros(2, 3)).warm_up(8)
    assert ("answers a sample otherwise beside other samples" in caplog.text) == mixes


def test_no_gradients_are_kept() -> None:
    recorded: list[bool] = []

    class Records(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            recorded.append(torch.is_inference_mode_enabled() and not self.training)
            return inputs

    model = ServedModel(Records(), torch.zeros(1))
    model.run([model.signature.parse([1.0])])
    assert recorded
    assert all(recorded)


def test_the_example_is_a_sample() -> None:
    model = served_linear()
    assert model.signature.parse(model.signature.example)["inputs"].shape == (4,)
    with pytest.raises(InputError):
        model.signature.parse([1, 2, 3])


@dataclass
class Scores:
    logits: Tensor


class Moments(NamedTuple):
    mean: Tensor
    spread: Tensor


@pytest.mark.parametrize(
    ("form", "names"),
    [
        (lambda y: {"head": {"a": y, "b": (y, y)}, "aux": y}, ["head.a", "head.b_0", "head.b_1", "aux"]),
        (lambda y: [y, {"x": y}], ["outputs_0", "outputs_1.x"]),
        (lambda y: Moments(y, y), ["mean", "spread"]),
        (Scores, ["logits"]),
        (lambda y: {"logits": y, "loss": None}, ["logits"]),
    ],
)
def test_tensors_of_any_depth_are_answered_by_name(
    form: Callable[[Tensor], Any], names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Nested(nn.Module):
        def forward(self, inputs: Tensor) -> Any:
            return form(inputs)

    served = ServedModel(Nested(), torch.zeros(2))
    (answer,) = served.run([served.signature.parse([1.0, 2.0])])
    assert isinstance(answer, dict)
    assert [spec.name for spec in served.signature.outputs] == list(answer) == names
    assert all(array.tolist() == [1.0, 2.0] for array in answer.values())
    assert caplog.text == ""


def test_two_outputs_of_one_name_are_refused_rather_than_lost() -> None:
    class Twice(nn.Module):
        def forward(self, inputs: Tensor) -> Any:
            return {"a.b": inputs, "a": {"b": 2 * inputs}}

    with pytest.raises(ModelError, match=r"two outputs named a\.b"):
        ServedModel(Twice(), torch.zeros(2))


def test_complex_numbers_are_refused_when_the_model_is_loaded() -> None:
    class Spectrum(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.fft.fft(inputs)

    with pytest.raises(ModelError, match=r"complex numbers, outputs: return torch\.view_as_real"):
        ServedModel(Spectrum(), torch.zeros(2))


def test_a_text_for_each_sample_is_answered() -> None:
    class Named(nn.Module):
        more: tuple[str, ...] = ()

        def forward(self, inputs: Tensor) -> Any:
            return {"label": ["cat" if row[0] > 0 else "dog" for row in inputs] + [*self.more], "logits": inputs}

    named = Named()
    served = ServedModel(named, torch.zeros(2))
    assert {spec.name: str(spec) for spec in served.signature.outputs} == {
        "label": "any JSON value",
        "logits": "float32 of shape [2]",
    }
    served.warm_up(4)
    answers = served.run([served.signature.parse([1.0, 2.0]), served.signature.parse([-1.0, 0.0])])
    assert [each["label"].item() for each in answers if isinstance(each, dict)] == ["cat", "dog"]
    named.more = ("one more",)
    (wrong,) = served.run([served.signature.parse([1.0, 2.0])])
    assert isinstance(wrong, ModelError)


def test_what_is_no_tensor_is_named_once_and_the_rest_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    class Told(nn.Module):
        def forward(self, inputs: Tensor) -> Any:
            return {"logits": inputs, "names": ["cat"] * 5, "note": "x"}

    served = ServedModel(Told(), torch.zeros(2), name="told")
    assert [spec.name for spec in served.signature.outputs] == ["logits"]
    served.run([served.signature.parse([1.0, 2.0])] * 2)
    wanted = "told returns names (a list), note (a str): no tensors or texts of samples, which are not answered"
    assert [record.message for record in caplog.records] == [wanted]


@pytest.mark.parametrize(
    ("multiple", "sizes"), [(8, (8, 16, 32, 40)), (16, (16, 32, 48)), (128, (128,)), (3, (3, 6, 12, 24, 36))]
)
def test_batches_are_padded_to_sizes_that_a_number_divides(multiple: int, sizes: tuple[int, ...]) -> None:
    most = 34
    assert padded_sizes(most, multiple) == sizes
    assert all(size % multiple == 0 for size in sizes)
    for count in range(1, most + 1):
        assert count <= padded_size(count, sizes) < max(2 * count, multiple + 1) + multiple


def test_a_model_sees_padded_batches_only_and_the_answers_of_real_samples_are_those_without_padding() -> None:
    seen: list[int] = []
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3).double()
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    plain = ServedModel(layer, torch.zeros(4).double())
    padded = ServedModel(layer, torch.zeros(4).double(), pad_to=padded_sizes(32, 16))
    samples = [plain.signature.parse(row) for row in np.random.default_rng(0).normal(size=(19, 4))]
    expected = plain.run(samples)
    seen.clear()
    for count in (1, 15, 16, 17, 19):
        for answer, alone in zip(padded.run(samples[:count]), expected, strict=False):
            assert isinstance(answer, dict)
            assert isinstance(alone, dict)
            np.testing.assert_allclose(answer["outputs"], alone["outputs"], rtol=0, atol=1e-14)
    assert seen == [16, 16, 16, 32, 32]
