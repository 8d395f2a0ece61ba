"""The memory that workers change without a lock: what is where, and who maps it."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from orchestray.platform.errors import ClusterError, TrainingError
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.variants.hogwild.shared_values import JOURNAL, Marks, SharedValues
from support.hogwild_runs import shape


def test_what_one_process_writes_another_one_reads_and_nothing_is_left_of_a_killed_one() -> None:
    told, tell = os.pipe()
    asked, ask = os.pipe()
    other = os.fork()
    if not other:
        try:
            os.close(ask)
            mine = SharedValues.create(shape())
            mine.values.copy_(torch.arange(9.0))
            os.write(tell, mine.address.encode())
            os.read(asked, 1)
            os.write(tell, str(float(mine.values[4])).encode())
            os.read(asked, 1)
        finally:
            os._exit(1)
    os.close(tell)
    address = os.read(told, 10_000).decode()
    shared = SharedValues.attach(address, shape())
    assert shared.values.tolist() == list(range(9))
    assert [view.shape for view in shared.views(shared.values)] == [(3, 2), (3,)]
    shared.values[4] = 40.0
    os.write(ask, b"?")
    assert os.read(told, 10_000) == b"40.0"
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert float(shared.values[4]) == 40.0  # a worker that has mapped it goes on
    with pytest.raises(ClusterError, match="cannot be opened"):
        SharedValues.attach(address, shape())
    for end in (told, ask, asked):
        os.close(end)


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


def test_the_newest_step_is_that_of_the_worker_that_is_ahead() -> None:
    shared = SharedValues.create(shape())
    first, second = (Marks(shared, worker) for worker in range(2))
    assert [first.reach(3), second.reach(1), second.reach(4), first.reach(3)] == [3, 3, 4, 4]
    assert second.reach(2) == 4, "a share that is handed out again does not turn it back"
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
    assert shared.update_counts() == {"updates": JOURNAL + 6, "lost_updates": 1}
    assert shared.version() == JOURNAL + 5
    Marks(shared, 1)  # the next worker with its number
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
