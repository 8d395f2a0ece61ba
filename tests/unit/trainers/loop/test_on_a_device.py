"""A step on a device that is not the CPU gives the CPU's bits, and waits for the device only where that is stated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fake_accelerator import built, compiler
from support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[4]
SUMS = ("trainers/sync/common/exact_sum.py", "ExactSums.read", "copy to the host")
"""All replicas decide together which parameters were used, and whether to stop."""
AGREED = ("trainers/core/unread.py", "Arriving.read", "read in the step that made it")
"""Workers that agree beside the gradients send their losses along, at the end of the step."""
PIPELINE = {
    ("platform/comm/channel/wire.py", "flat_bytes", "copy to the host"),
    ("trainers/core/forward.py", "Forward.loss", "a number is read"),
    ("trainers/parallel/pipeline/links.py", "Links._unpacked.<locals>.<listcomp>", "copy from pageable memory"),
}
"""Activations cross through the memory of the host, micro-batch by micro-batch, so a loss read there adds no wait."""
SERVERS = {
    ("platform/comm/channel/wire.py", "flat_bytes", "copy to the host"),
    ("trainers/ps/worker/order_loop.py", "OrderLoop._backward", "a number is read"),
}
"""A push sends the gradient from the memory of the host, and the loss with it."""
WAITS: dict[str, set[tuple[str, str, str]]] = {
    "one": set(),
    "one, clipped": set(),
    "one, adamw and an average": set(),
    "data": {SUMS},
    "data, clipped": {SUMS},
    "zero1": {SUMS},
    "zero2": {SUMS},
    "zero3": {SUMS},
    "averaging": {AGREED},
    "tensor": {AGREED},
    "pipeline": PIPELINE,
    "tensor and pipeline": PIPELINE,
    "gossip": {AGREED, ("trainers/sync/local/gossip.py", "Gossip._estimate", "a number is read")},
    "elastic averaging": {
        AGREED,
        ("trainers/sync/local/elastic.py", "ElasticAveraging.after_step.<locals>.<genexpr>", "a number is read"),
    },
    "one, lars": {("trainers/optim/lars.py", "LayerWise._norms", "copy to the host")},
    "one in bfloat16": set(),
    "data in bfloat16": {SUMS},
    "zero3 in bfloat16": {SUMS},
}
"""The places at which the steps of a layout wait for the device; none may be added without its reason here."""

ROUNDED = 2**-8
"""Most by which weights, all below 1, differ after five steps in bfloat16: the rounding of one number to its 8 bits."""

pytestmark = pytest.mark.skipif(compiler() is None, reason="the device is compiled, and there is no g++")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    library = built(request.config.cache.mkdir("fake_accelerator"))
    done = subprocess.run(
        [sys.executable, "-m", "support.on_fake_accelerator", str(library)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_every_layout_in_float32_gives_weights_and_lines_of_the_cpu_bit_for_bit(found: dict[str, Any]) -> None:
    runs = {name: run for name, run in found["layouts"].items() if name not in found["rounded"]}
    keys = ("weights are equal", "lines are equal", "result is equal")
    equal = {name: {key: run[key] for key in keys} for name, run in runs.items()}
    assert equal == {name: dict.fromkeys(keys, True) for name in WAITS if name not in found["rounded"]}


def test_bfloat16_is_as_near_to_float32_on_a_device_as_on_the_cpu(found: dict[str, Any]) -> None:
    """Bits differ, as a device rounds by a list of operations of its own."""
    assert found["rounded"].keys() == {name for name in WAITS if "bfloat16" in name}
    for name, far in found["rounded"].items():
        assert 0 < far <= ROUNDED, name
        assert found["layouts"][name]["furthest"] <= ROUNDED, name


def test_workers_on_a_device_under_parameter_servers_train_to_the_cpus_bits_and_wait_where_it_is_stated(
    found: dict[str, Any],
) -> None:
    assert found["servers"]["weights are equal"]
    assert found["servers"]["losses are equal"]
    assert {tuple(each) for each in found["servers"]["waits"]} == SERVERS


def test_a_step_waits_for_the_device_where_it_is_stated_and_nowhere_else(found: dict[str, Any]) -> None:
    assert {name: {tuple(each) for each in run["waits"]} for name, run in found["layouts"].items()} == WAITS


def test_a_tensor_at_the_wrong_place_fails_as_on_a_gpu(found: dict[str, Any]) -> None:
    assert "Expected all tensors to be on the same device" in found["misplaced"]


@pytest.mark.parametrize("layout", ["one", "data"])
def test_a_loss_that_is_read_late_is_refused_with_the_text_of_one_that_is_read_at_once(
    found: dict[str, Any], layout: str
) -> None:
    at_once, late = found["nan"][layout]
    assert "The loss became nan at step 2 on worker" in at_once
    assert late == at_once


def test_a_loss_that_is_not_finite_is_refused_after_the_steps_that_follow_without_an_agreement(
    found: dict[str, Any],
) -> None:
    for text in found["nan long ago"]:
        assert "The loss became nan at step 2 on worker" in text


def test_no_checkpoint_is_saved_behind_a_loss_that_is_not_finite(found: dict[str, Any]) -> None:
    assert found["saved"] == [[1], [1]]


def test_a_served_batch_is_answered_as_on_the_cpu_and_waits_for_its_answers_alone(found: dict[str, Any]) -> None:
    assert found["served"] == {"answers are equal": True, "waits": ["CPU waits for answers"]}
