"""Rules for every compressor: messages of the bytes they should have, nothing lost, nothing drawn twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.trainers.compression.base import Compressor, SparseCompressor
from orchestray.trainers.compression.registry import make_compressor
from orchestray.trainers.config.sections import Compression

SHAPES: list[tuple[int, ...]] = [(16, 3, 3, 3), (16,), (40, 30), (40,), (1,), (), (513, 2), (2, 2)]
SEED = 11

COMPRESSORS: dict[str, dict[str, Any]] = {
    "float16": {"type": "float16"},
    "float16 stochastic": {"type": "float16", "rounding": "stochastic"},
    "bfloat16": {"type": "bfloat16"},
    "bfloat16 stochastic": {"type": "bfloat16", "rounding": "stochastic"},
    "qsgd": {"type": "qsgd"},
    "qsgd 2 bits l2": {"type": "qsgd", "bits": 2, "norm": "l2", "bucket": 64},
    "qsgd 3 bits": {"type": "qsgd", "bits": 3, "bucket": 7},
    "qsgd 8 bits huffman": {"type": "qsgd", "bits": 8, "huffman": True},
    "terngrad": {"type": "terngrad"},
    "terngrad huffman": {"type": "terngrad", "clip": None, "huffman": True},
    "onebit": {"type": "onebit"},
    "onebit by row": {"type": "onebit", "scale": "row"},
    "topk": {"type": "topk", "ratio": 0.05},
    "topk all": {"type": "topk", "ratio": 1.0},
    "threshold": {"type": "threshold", "threshold": 1.5},
    "threshold signs": {"type": "threshold", "threshold": 1.5, "values": "threshold"},
    "adaptive_threshold": {"type": "adaptive_threshold", "ratio": 0.1},
    "adaptive_threshold means": {"type": "adaptive_threshold", "ratio": 0.1, "values": "means"},
    "dgc": {"type": "dgc", "ratio": 0.01, "momentum": 0.0},
    "powersgd": {"type": "powersgd", "rank": 2},
}
NAMES = list(COMPRESSORS)
FIXED = [name for name in NAMES if COMPRESSORS[name]["type"] not in ("topk", "threshold", "adaptive_threshold", "dgc")]


def gradients(
    seed: int, dtype: torch.dtype = torch.float64, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def made(name: str, dtype: torch.dtype = torch.float64, *, worker: int = 0, **more: Any) -> Compressor:
    compressor = make_compressor(**COMPRESSORS[name], **more, seed=SEED, worker=worker, num_workers=2)
    compressor.init(gradients(0, dtype))
    return compressor


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def residual_of(compressor: Compressor) -> list[Tensor]:
    return compressor._as_templates(compressor.state()["residual"])


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sent_and_the_residual_are_the_sum_of_all_gradients(name: str) -> None:
    sender, reader = made(name, error_feedback=True), made(name)
    sent, given = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES], flat(gradients(0)) * 0
    for step in range(1, 21):
        gradient = gradients(step)
        message = sender.compress(gradient, step=step)
        torch._foreach_add_(sent, reader.decompress(message))
        given += flat(gradient)
        torch.testing.assert_close(flat(sent) + flat(residual_of(sender)), given, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_with_error_feedback_no_message_loses_more_than_it_was_to_carry(name: str) -> None:
    sender = made(name, error_feedback=True)
    carried = flat(gradients(0)) * 0
    for step in range(1, 41):
        given = flat(gradients(step)) + carried
        sender.compress(gradients(step), step=step)
        carried = flat(residual_of(sender))
        assert carried.norm() <= given.norm()


@pytest.mark.parametrize("name", NAMES)
def test_the_error_norm_is_that_of_what_the_message_lost(name: str) -> None:
    for error_feedback in (False, True):
        sender, reader = made(name, error_feedback=error_feedback), made(name)
        assert sender.error_norm == 0.0
        carried = torch.zeros_like(flat(gradients(0)))
        for step in (1, 2):
            given = flat(gradients(step)) + carried
            lost = given - flat(reader.decompress(sender.compress(gradients(step), step=step)))
            assert sender.error_norm == pytest.approx(float(lost.norm()), rel=1e-9, abs=1e-12)
            carried = lost if error_feedback else carried


@pytest.mark.parametrize(("name", "codes"), [("onebit", 2), ("terngrad", 3), ("qsgd 3 bits", 7)])
def test_a_report_counts_the_codes_that_were_sent_and_says_what_error_feedback_carries(name: str, codes: int) -> None:
    plain, sender = made(name, error_feedback=False), made(name, error_feedback=True)
    assert sender.run_report() == {}
    for step in (1, 2):
        plain.compress(gradients(step), step=step)
        sender.compress(gradients(step), step=step)
    assert plain.run_report() == {"codes": codes}
    residual = flat(residual_of(sender))
    mean_error = pytest.approx(float(residual.norm()) / 2, abs=1e-6)
    carried = int((residual != 0).sum())
    assert sender.run_report() == {"codes": codes, "messages": 2, "carried": carried, "mean_error": mean_error}


@pytest.mark.parametrize("name", NAMES)
def test_a_message_is_read_by_another_instance_with_no_state(name: str) -> None:
    sender, reader = made(name, worker=1), made(name, worker=0)
    for step in (1, 2, 3):
        message = sender.compress(gradients(step), step=step)
        assert (message.dtype, message.dim()) == (torch.uint8, 1)
        own, others = sender.decompress(message), reader.decompress(message)
        assert [tensor.shape for tensor in others] == [torch.Size(shape) for shape in SHAPES]
        assert all(tensor.dtype == torch.float64 for tensor in others)
        assert torch.equal(flat(own), flat(others))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_compressed_is_not_changed_and_reading_changes_no_state(name: str) -> None:
    sender = made(name)
    gradient = gradients(1)
    message = sender.compress(gradient, step=1)
    assert torch.equal(flat(gradient), flat(gradients(1)))
    before = {key: tensor.clone() for key, tensor in sender.state().items()}
    kept, copy = message, message.clone()
    sender.decompress(message)[0].add_(1.0)
    sender.compress(gradients(2), step=2)
    assert torch.equal(kept, copy)
    again = made(name)
    again.compress(gradient, step=1)
    assert all(torch.equal(tensor, before[key]) for key, tensor in again.state().items())


@pytest.mark.parametrize("name", NAMES)
def test_a_step_draws_the_same_again_and_from_its_state_everything_goes_on_as_it_would_have(name: str) -> None:
    first = made(name)
    first.compress(gradients(1), step=1)
    saved = {key: tensor.clone() for key, tensor in first.state().items()}
    expected = [first.compress(gradients(step), step=step) for step in (2, 3)]
    second = made(name)
    second.compress(gradients(9), step=9)  # whatever came before
    second.load_state(saved)
    for step, message in zip((2, 3), expected, strict=True):
        assert torch.equal(second.compress(gradients(step), step=step), message)


@pytest.mark.parametrize("name", ["float16 stochastic", "bfloat16 stochastic", "qsgd", "terngrad"])
def test_workers_and_steps_draw_apart(name: str) -> None:
    gradient = gradients(1)
    drawn = [made(name, worker=w).compress(gradient, step=s) for w, s in ((0, 1), (1, 1), (0, 2), (1, 2))]
    for index, message in enumerate(drawn):
        assert all(not torch.equal(message, other) for other in drawn[:index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FIXED)
def test_a_message_has_the_bytes_of_the_formula(name: str, dtype: torch.dtype) -> None:
    settings, value_bytes = COMPRESSORS[name], dtype.itemsize
    raw, scales, num_bits = 0, 0, 0
    for shape in SHAPES:
        numel = math.prod(shape)
        bits, num_scales = 16, 0
        if settings["type"] == "qsgd":
            bits, num_scales = settings.get("bits", 4), -(-numel // settings.get("bucket", 512))
        elif settings["type"] in ("terngrad", "onebit"):
            bits, num_scales = (2 if settings["type"] == "terngrad" else 1), 1
            if settings.get("scale") == "row":
                num_scales = 2 * (shape[0] if len(shape) > 1 else 1)
        elif settings["type"] == "powersgd":
            rows, columns = (shape[0], numel // shape[0]) if len(shape) > 1 else (numel, 0)
            rank = min(2, rows, columns) if columns else 1
            bits, num_scales = 0, (rows + columns) * rank
        if num_scales * value_bytes + numel * bits / 8 >= numel * value_bytes:
            raw += numel
        else:
            scales += num_scales
            num_bits += numel * bits
    expected = (raw + scales) * value_bytes + -(-num_bits // 8)
    compressor = made(name, dtype)
    if "huffman" in name:
        assert compressor.message_bytes is None
        assert compressor.compress(gradients(1, dtype), step=1).numel() <= expected + 8
    else:
        assert compressor.message_bytes == expected
        assert compressor.compress(gradients(1, dtype), step=1).numel() == expected


@pytest.mark.parametrize("name", NAMES)
def test_dense_bytes_are_those_of_the_tensors_and_no_message_is_longer(name: str) -> None:
    compressor = made(name, torch.float32)
    assert compressor.dense_bytes == 4 * sum(math.prod(shape) for shape in SHAPES)
    assert compressor.compress(gradients(1, torch.float32), step=1).numel() <= compressor.dense_bytes + 8


@pytest.mark.parametrize("name", NAMES)
def test_float32_tensors_come_back_as_float32_near_what_float64_gives(name: str) -> None:
    compressor = made(name, torch.float32)
    found = compressor.decompress(compressor.compress(gradients(1, torch.float32), step=1))
    assert all(tensor.dtype == torch.float32 for tensor in found)
    assert torch.isfinite(flat(found)).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_zeros_are_sent_as_zeros_and_do_not_stop_what_comes_after(name: str) -> None:
    compressor = made(name, error_feedback=True)
    zeros = [torch.zeros_like(gradient) for gradient in gradients(1)]
    assert not flat(compressor.decompress(compressor.compress(zeros, step=1))).any()
    assert flat(compressor.decompress(compressor.compress(gradients(2), step=2))).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_does_not_arrive_as_if_it_were(name: str, value: float) -> None:
    compressor = made(name)
    gradient = gradients(1)
    gradient[2][3, 4] = value
    found = compressor.decompress(compressor.compress(gradient, step=1))
    assert not torch.isfinite(found[2]).all()


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_other_shapes_are_refused(name: str) -> None:
    compressor = made(name)
    for wrong in (gradients(1)[:-1], [*gradients(1)[:-1], torch.zeros(4, dtype=torch.float64)]):
        with pytest.raises(ValueError, match="was made for 8 tensors"):
            compressor.compress(wrong, step=1)


@pytest.mark.parametrize("name", [name for name in FIXED if "huffman" not in name])
def test_a_message_of_another_length_is_refused(name: str) -> None:
    compressor = made(name)
    message = compressor.compress(gradients(1), step=1)
    with pytest.raises(ValueError, match=f"{message.numel() - 1} bytes was received where {message.numel()} bytes"):
        compressor.decompress(message[:-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shapes", [[], [(0,), (3, 0)], [(0,), (5,), (0, 2)], [(1,)], [()]])
def test_no_tensors_and_empty_ones_travel_too(name: str, shapes: list[tuple[int, ...]]) -> None:
    compressor = make_compressor(**COMPRESSORS[name], seed=SEED)
    gradient = gradients(1, shapes=shapes)
    compressor.init(gradient)
    found = compressor.decompress(compressor.compress(gradient, step=1))
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in gradient]


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_are_not_contiguous_are_sent_by_their_values(name: str) -> None:
    straight = gradients(1)
    turned = [tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for tensor in straight]
    messages = [made(name).compress(tensors, step=1) for tensors in (straight, turned)]
    assert torch.equal(*messages)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FIXED])
def test_places_and_values_are_what_the_message_holds(name: str) -> None:
    for step in (1, 2):
        sender, twin = made(name), made(name)
        assert isinstance(sender, SparseCompressor)
        assert isinstance(twin, SparseCompressor)
        indices, values = sender.compress_sparse(gradients(step), step=step)
        assert torch.equal(indices, indices.unique())
        message = twin.compress(gradients(step), step=step)
        assert torch.equal(message, sender.pack_sparse(indices, values))
        dense = torch.zeros(sender.num_values, dtype=torch.float64).index_copy_(0, indices, values)
        assert torch.equal(flat(twin.decompress(message)), dense)
        places, again = twin.unpack_sparse(message)
        assert torch.equal(torch.zeros_like(dense).index_copy_(0, places, again), dense)


def test_only_sparse_compressors_say_that_they_are() -> None:
    assert {name for name in NAMES if made(name).is_sparse} == set(NAMES) - set(FIXED)


def test_every_compression_of_the_config_is_made_with_its_defaults() -> None:
    sections = Compression.__args__[0].__args__  # type: ignore[attr-defined]
    types = {}
    for annotated in sections:
        section = annotated.__args__[0]
        required = {"threshold": 0.1} if "threshold" in section.model_fields else {}
        type_ = section.model_fields["type"].annotation.__args__[0]
        types[type_] = section(type=type_, **required).model_dump()
    assert types.pop("none") == {"type": "none"}
    assert set(types) == {settings["type"] for settings in COMPRESSORS.values()}
    for settings in types.values():
        compressor = make_compressor(**settings, seed=1, worker=0, num_workers=4)
        compressor.init(gradients(0))
        compressor.compress(gradients(1), step=1)
        assert ("residual" in compressor.state()) == settings["error_feedback"]


def test_a_compression_that_is_none_of_these_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'zip' is not a compression; there are none, float16, bfloat16, qsgd"):
        make_compressor("zip")
