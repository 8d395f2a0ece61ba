"""The micro-batches that are found fit the memory in a real run, and fewer would not."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.planning.micro_batching import fewest_micro_batches
from orchestray.trainers.planning.subject import Subject, subject_of
from support.layouts import layout_settings
from support.training import State, digits, furthest, state_of, stream_of

OVERRIDES = ["task.hidden=[48, 48]", "train.batch_size=40"]
SCALARS = 64
"""Bytes of the loss's own scalars, which a run keeps beside the analysis."""


def subject() -> Subject:
    return subject_of("configs/train/digits.yaml", OVERRIDES)


def trained(accumulate: int) -> tuple[int, State]:
    """Return the peak bytes of activations of a run of one step, and its weights."""
    task = digits(hidden=[48, 48])
    settings = layout_settings(
        {"microbatches": None}, precision="float32", steps=1, batch_size=40, accumulate=accumulate
    )
    replica = Replica(task, settings, stream_of(task, settings))
    replica.connect(SoloCollective())
    replica.run(time.time())
    return replica.meter.peak_bytes, state_of(replica.model)


@pytest.mark.parametrize("cap", [20_000, 9_000, 2_500])
def test_the_fewest_micro_batches_within_a_memory_keep_no_more_in_a_run_and_give_the_same_weights(cap: int) -> None:
    found = fewest_micro_batches(subject(), cap)
    assert found.accumulate > 1
    peak, weights = trained(found.accumulate)
    assert found.peak_bytes <= cap
    assert peak == pytest.approx(found.peak_bytes, abs=SCALARS)
    assert trained(found.accumulate - 1)[0] > cap
    assert peak <= cap
    assert furthest(weights, trained(1)[1]) <= 1e-6


def test_a_batch_that_fits_is_left_whole() -> None:
    assert fewest_micro_batches(subject(), 1e9).accumulate == 1


def test_a_memory_too_small_for_a_sample_and_a_module_without_a_task_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one sample keeps .* set train\.recompute"):
        fewest_micro_batches(subject(), 100)
    alone = Subject("alone", nn.Linear(2, 2).to("meta"), torch.zeros(3, 2, device="meta"), 3)
    with pytest.raises(ConfigError, match="cannot be cut into micro-batches"):
        fewest_micro_batches(alone, 1e9)
