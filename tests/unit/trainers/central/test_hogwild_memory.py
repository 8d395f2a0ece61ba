"""The memory that workers change without a lock: what is where, and who maps it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from orchestray.platform.errors import ClusterError, TrainingError
from orchestray.trainers.central.shared_values import JOURNAL, Marks, SharedValues
from orchestray.trainers.optimizers import make_optimizer
from support.hogwild_runs import shape


def test_what_one_process_writes_another_one_reads_and_nothing_is_left_of_a_killed_one() -> None:
    program = (
        "import sys, time, torch\n"
        "from orchestray.trainers.central.shared_values import SharedValues, Shape\n"
        "shared = SharedValues.create(Shape((('weight', (3, 2)), ('bias', (3,))), torch.float64, 2))\n"
        "shared.values.copy_(torch.arange(9.0))\n"
        "print(shared.address, flush=True)\n"
        "sys.stdin.readline()\n"
        "print(float(shared.values[4]), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        address = other.stdout.readline()
        shared = SharedValues.attach(address, shape())
        assert shared.values.tolist() == list(range(9))
        assert [view.shape for view in shared.views(shared.values)] == [(3, 2), (3,)]
        shared.values[4] = 40.0
        print(file=other.stdin, flush=True)
        assert other.stdout.readline() == "40.0\n"
        other.kill()
        other.wait()
        assert float(shared.values[4]) == 40.0  # who has mapped it goes on
        with pytest.raises(ClusterError, match="cannot be opened"):
            SharedValues.attach(address, shape())


def test_attaching_says_what_is_wrong() -> None:
    shared = SharedValues.create(shape())
    address = json.loads(shared.address)
    with pytest.raises(ClusterError, match="on one node"):
        SharedValues.attach(json.dumps({**address, "machine": "another"}), shape())
    with pytest.raises(TrainingError, match="another model"):
        SharedValues.attach(shared.address, shape(parameters=(("weight", (300, 2)),)))
    with pytest.raises(ClusterError, match="another is in its place"):
        SharedValues.attach(json.dumps({**address, "token": "00"}), shape())
    shared.close()
    with pytest.raises(ClusterError):
        SharedValues.attach(json.dumps(address), shape())


def test_every_region_lies_at_a_multiple_of_its_size() -> None:
    slots = ("step", "exp_avg")
    shared = SharedValues.create(shape(num_floats=3, num_integers=1, slots=slots, dtype=torch.float32))
    tensors = [shared.values, shared.buffers.floats, shared.buffers.integers, shared.counter]
    assert [tensor.numel() for tensor in tensors] == [9, 3, 1, 1]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert shared.marks.shape == (2, 8)
    shared.close()


def test_the_state_of_two_optimizers_is_the_same_memory() -> None:
    slots = {"slots": ("step", "exp_avg", "exp_avg_sq")}
    shared = SharedValues.create(shape(**slots))
    rules = [make_optimizer("adam") for _ in range(2)]
    views = shared.views(shared.values)
    for rule, fill in zip(rules, (True, False), strict=True):
        rule.init(zip(("weight", "bias"), views, strict=True))
        shared.share_state(rule, ("weight", "bias"), fill=fill)
    gradients = [torch.ones_like(view) for view in views]
    rules[0].step(views, gradients, 0.1)
    state = rules[1].state_tensors()
    assert float(state["weight.step"]) == 1.0
    assert state["bias.exp_avg"].tolist() == pytest.approx([0.1] * 3)
    rules[1].step(views, gradients, 0.1)
    alone, values = make_optimizer("adam"), [torch.zeros_like(view) for view in views]
    alone.init(zip(("weight", "bias"), values, strict=True))
    for _ in range(2):
        alone.step(values, gradients, 0.1)
    assert all(torch.equal(*pair) for pair in zip(views, values, strict=True))
    shared.close()


def test_the_journal_keeps_the_last_updates_of_each_worker_and_none_that_has_not_begun() -> None:
    shared = SharedValues.create(shape())
    assert shared.left_by(1) == []
    marks = Marks(shared, 1)
    for number in range(JOURNAL + 5):
        marks.begin(number, number / 2, number, number + 1)
        marks.end()
    kept = shared.left_by(1)
    assert kept == [[number, number / 2, number, number + 1] for number in range(6, JOURNAL + 5)]
    assert shared.left_by(0) == []
    # The next one's entry is written, and its worker killed before it has begun.
    shared.journal[1, (JOURNAL + 5) % JOURNAL] = 99, 99, 99
    assert shared.left_by(1) == kept
    assert shared.version() == JOURNAL + 5
    Marks(shared, 1).begin(70, 0.0, 0, 0)
    assert shared.told() == {"updates": JOURNAL + 6, "lost_updates": 1}
    assert shared.version() == JOURNAL + 5
    Marks(shared, 1)  # whoever comes after it
    assert shared.version() == JOURNAL + 6
    shared.close()


def test_threads_of_a_process_map_the_memory_apart() -> None:
    shared = SharedValues.create(shape())
    again = SharedValues.attach(shared.address, shape())
    again.values[3] = 3.0
    assert again.values.data_ptr() != shared.values.data_ptr()
    assert float(shared.values[3]) == 3.0
    shared.close()
    assert os.getpid() == json.loads(again.address)["process"]
