"""All-reduce of compressed gradients: what is sent, what is owed, and the whole loop with every code."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.compression.registry import make_compressor
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.sync.compressed.compressed_allreduce import Compressed
from orchestray.trainers.sync.compressed.powersgd import PowerSgd
from orchestray.trainers.sync.factory import make_exchange
from support.layouts import layout_settings, train_and_keep, train_laid_out
from support.lockstep import SHAPES, Exchanged, exchange_by_hand, gradient, owed, same_everywhere
from support.training import digits, few_digits, furthest, same_bits

CODES: dict[str, dict[str, Any]] = {
    "float16": {"type": "float16"},
    "bfloat16": {"type": "bfloat16", "rounding": "stochastic"},
    "qsgd": {"type": "qsgd", "bits": 4, "bucket": 64},
    "qsgd-huffman": {"type": "qsgd", "bits": 3, "bucket": 64, "huffman": True},
    "terngrad": {"type": "terngrad"},
    "onebit": {"type": "onebit"},
    "topk": {"type": "topk", "ratio": 0.1},
    "threshold": {"type": "threshold", "threshold": 0.05},
    "adaptive_threshold": {"type": "adaptive_threshold", "ratio": 0.1},
    "dgc": {"type": "dgc", "ratio": 0.1, "warmup_steps": 2},
    "powersgd": {"type": "powersgd", "rank": 2},
}
DENSE = ["float16", "bfloat16", "qsgd", "qsgd-huffman", "terngrad", "onebit"]
FED_BACK = [*DENSE, "topk", "threshold", "adaptive_threshold", "powersgd"]
FORGETFUL = ["float16", "bfloat16", "qsgd", "qsgd-huffman", "terngrad", "dgc"]
"""Codes that by default feed no error back; the others get the same bits in the test of what is owed."""


def by_hand(code: str, size: int, num_steps: int, **more: Any) -> list[Exchanged]:
    section = {**CODES[code], **more.pop("keys", {})}
    return exchange_by_hand(lambda: make_exchange(compression=section, seed=3), size, num_steps, **more)


def sent_and_owed(seen: list[Exchanged], num_steps: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return two tensors for each parameter: what the optimizers got in all steps and are owed, and the sum of
    gradients.
    """
    pairs = []
    for number, shape in enumerate(SHAPES):
        got = torch.zeros(shape, dtype=torch.float64)
        for gradients in seen[0].gradients:
            given = gradients[number]
            assert given is not None
            got += given
        whole = sum(gradient(rank, step)[number] for rank in range(size) for step in range(1, num_steps + 1))
        assert isinstance(whole, Tensor)
        pairs.append((got + owed(seen, number), whole))
    return pairs


@pytest.mark.parametrize(
    ("code", "size"), [*((code, size) for code in FED_BACK for size in (2, 3)), ("onebit", 4), ("topk", 4)]
)
def test_what_was_sent_and_what_is_owed_is_the_sum_of_all_gradients(code: str, size: int) -> None:
    seen = by_hand(code, size, 5, keys={"error_feedback": True})
    for found, wanted in sent_and_owed(seen, 5, size):
        assert float((found - wanted).abs().max()) <= 1e-12 * max(1.0, float(wanted.abs().max()))
    assert same_everywhere(seen)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("code", FORGETFUL)
def test_every_replica_gets_the_same_bits(code: str, size: int) -> None:
    assert same_everywhere(by_hand(code, size, 3))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("code", ["float16", "qsgd", "terngrad", "onebit"])
def test_a_dense_code_sends_two_parts_of_a_message_for_each_other_replica(code: str, size: int) -> None:
    """Count 2 (P-1) messages of a chunk from all together; P (P-1) whole ones where that is not more, as with two."""
    seen = by_hand(code, size, 1)
    small = 8 * (len(SHAPES) + 8 * size)  # a flag a parameter, and room for 8 numbers of each rank
    whole = make_compressor(**CODES[code])
    whole.init([torch.empty(shape, dtype=torch.float64) for shape in SHAPES])
    assert whole.message_bytes is not None
    total = sum(replica.bytes_sent[0] - -(-2 * (size - 1) * small // size) for replica in seen)
    if size == 2:
        assert total == 2 * whole.message_bytes
    else:
        assert total < size * (size - 1) * whole.message_bytes
        coder = seen[0].exchange._coded[0]
        assert total == coder.bytes_of_all
        chunks = 2 * (size - 1) * whole.message_bytes
        assert chunks <= total <= chunks + 2 * (size - 1) * size * 8 * (len(SHAPES) + 12)  # scales of the parts


@pytest.mark.parametrize("code", ["onebit", "topk", "qsgd"])
def test_what_a_ring_would_have_sent_is_told_beside_it(code: str) -> None:
    size, elements = 3, sum(torch.Size(shape).numel() for shape in SHAPES)
    seen = by_hand(code, size, 2)
    small = 8 * (len(SHAPES) + 8 * size)
    dense = 2 * (2 * (size - 1) * small / size + 2 * (size - 1) * 8 * elements / size)
    assert seen[0].bytes_dense == pytest.approx(dense, abs=2 * (len(SHAPES) + 1))
    assert seen[0].bytes_sent[0] < dense / 4


def test_a_parameter_nobody_used_has_no_gradient_until_somebody_has() -> None:
    def some(rank: int, step: int) -> list[Tensor | None]:
        every: list[Tensor | None] = list(gradient(rank, step))
        if step == 1 or rank == 0 or step == 3:
            every[3] = None
        return every

    seen = by_hand("topk", 2, 3, gradients=some)
    assert seen[0].gradients[0][3] is None
    assert seen[0].gradients[1][3] is not None
    # What replica 1 could not send in step 2 comes in step 3, though nobody has a gradient then.
    later = seen[1].gradients[2][3]
    assert later is not None
    assert int(later.count_nonzero()) > 0
    memoryless = by_hand("qsgd", 2, 3, gradients=some)
    assert [row[3] is None for row in memoryless[0].gradients] == [True, False, True]


# -- the whole loop ----------------------------------------------------------------------------------------------------


def task() -> Any:
    return few_digits()


def coded(code: str, data: int = 2, network: dict[str, Any] | None = None, **train: Any) -> ReplicaSettings:
    optimizer = {"type": "sgd", "lr": 0.1, "momentum": 0.0 if code == "dgc" else 0.9}
    parts = {"microbatches": 4 if "pipeline" in (network or {}) else 1}
    settings = layout_settings({"data": data, **parts, **(network or {})}, **{"optimizer": optimizer, **train})
    return replace(settings, compression=CODES[code])


TENSOR, PIPELINE = {"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2}


@pytest.mark.parametrize(
    ("code", "network"),
    [
        *((code, {"data": 2}) for code in sorted(CODES)),
        # Of three, each sums a chunk of a dense code; a sparse code has no parts, and factors are summed on the way.
        *[("onebit", {"data": 3}), ("onebit", TENSOR), ("topk", PIPELINE), ("powersgd", TENSOR)],
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, code: str, network: dict[str, Any]) -> None:
    settings = coded(code, network=network, steps=3)
    if "pipeline" in network:
        settings = replace(settings, pipeline=replace(settings.pipeline, split="equal"))
    whole, load = train_and_keep(task, settings, tmp_path, 2)
    again = train_laid_out(task, settings, load=load)
    assert same_bits(again.weights, whole.weights)
    assert again.losses == whole.losses[2:]


@pytest.mark.parametrize(
    ("code", "keys", "networks"),
    [
        ("topk", {"ratio": 1.0}, [{"data": 3}, TENSOR]),
        ("threshold", {"threshold": 1e-300}, [{"data": 2}]),
        ("powersgd", {"rank": 64}, [{"data": 2}, {"data": 3}]),
    ],
)
def test_a_code_that_loses_nothing_is_the_single_process(code: str, keys: Any, networks: list[dict[str, Any]]) -> None:
    one = train_laid_out(task, layout_settings(steps=3))
    for network in networks:
        settings = replace(layout_settings(network, steps=3), compression={**CODES[code], **keys})
        found = train_laid_out(task, settings)
        assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
        assert furthest(found.weights, one.weights) <= 1e-12


def many_to_validate() -> Any:
    return digits(hidden=[24, 16])


def accuracy(outcome: Outcome) -> float:
    validation = outcome.final["validation"]
    assert validation is not None
    return float(validation["accuracy"])


@functools.cache
def dense_outcome(chosen: str) -> Outcome:
    return train_laid_out(
        many_to_validate, layout_settings({"data": 1, "microbatches": 1}, **json.loads(chosen))
    ).outcome


@pytest.mark.parametrize("code", ["onebit", "topk", "qsgd", "powersgd"])
def test_compressed_training_learns_the_digits_about_as_well_as_dense(code: str) -> None:
    chosen = {"precision": "float32", "steps": 120, "batch_size": 64, "validate_every_steps": 120}
    # With one size a tensor a large momentum takes it too far.
    chosen["optimizer"] = (
        {"type": "sgd", "lr": 0.3} if code == "onebit" else {"type": "sgd", "lr": 0.1, "momentum": 0.9}
    )
    dense = dense_outcome(json.dumps(chosen))
    outcome = train_laid_out(many_to_validate, coded(code, 2, **chosen)).outcome
    assert accuracy(dense) > 0.8
    assert accuracy(outcome) > accuracy(dense) - 0.05
    assert outcome.bytes_sent < outcome.bytes_dense / 3


def test_other_replicas_or_another_code_begin_with_nothing_owed(tmp_path: Path) -> None:
    train_laid_out(task, coded("onebit", 2, steps=2), checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))

    def load() -> Loaded:
        found = latest_good(tmp_path)[0]
        assert found is not None
        return Loaded(found)

    for settings in (coded("onebit", 3, steps=3), coded("topk", 2, steps=3), layout_settings({"data": 2}, steps=3)):
        assert len(train_laid_out(task, settings, load=load).losses) == 1


def test_a_scheme_is_chosen_by_the_sections_of_the_config() -> None:
    assert isinstance(make_exchange(compression={"type": "onebit", "error_feedback": True}), Compressed)
    assert isinstance(make_exchange(compression={"type": "powersgd", "rank": 1, "error_feedback": True}), PowerSgd)
