"""The task `python_source`."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import pytest
import torch

from orchestray.platform.data.source import open_source
from orchestray.platform.errors import DataError, TaskError
from orchestray.trainers.tasks.python_source import PythonSource

SMALL = {"context": 16, "width": 16, "depth": 2, "heads": 2, "num_files": 12}


def test_samples_are_the_library_s_own_text_in_order() -> None:
    first = min(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")).read_bytes()
    task = PythonSource(context=16)
    rows = task.dataset("train")["bytes"].slice(0, 20).to_pylist()
    assert bytes(byte for row in rows for byte in row) == first[: 20 * 17]
    assert task.dataset("train").equals(task.dataset("train"))


@pytest.mark.parametrize("num_files", [2, 9, 10, 64])
def test_no_file_is_both_trained_and_validated_on(num_files: int) -> None:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
    task = PythonSource(context=1, num_files=num_files)
    sizes = [2 * task.dataset(split).num_rows for split in ("train", "validation")]
    held_out = files[9::10] or files[-1:]
    assert sizes[1] == pytest.approx(sum(f.stat().st_size for f in held_out), abs=1)
    assert sum(sizes) == pytest.approx(sum(f.stat().st_size for f in files), abs=2)


def test_targets_are_the_bytes_that_follow() -> None:
    task = PythonSource(**SMALL)
    table = task.dataset("train").slice(0, 5)
    batch = task.to_batch(table)
    rows = torch.tensor(table["bytes"].to_pylist())
    assert torch.equal(batch["inputs"], rows[:, :-1])
    assert torch.equal(batch["targets"], rows[:, 1:])
    assert batch["inputs"].dtype == torch.int64
    assert all(tensor.is_contiguous() for tensor in batch.values())


def test_a_prediction_depends_on_earlier_bytes_only() -> None:
    task = PythonSource(**SMALL)
    torch.manual_seed(0)
    model = task.build_model().eval()
    with torch.no_grad():
        inputs = task.example_inputs()[None]
        before = model(inputs)
        changed = inputs.clone()
        changed[0, 9] = 65
        after = model(changed)
        shorter = model(inputs[:, :5])
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])
    torch.testing.assert_close(shorter, before[:, :5])


def test_the_model_is_a_sequence_whose_blocks_a_pipeline_can_cut() -> None:
    model = PythonSource(**SMALL).build_model()
    assert isinstance(model, torch.nn.Sequential)
    assert [type(part).__name__ for part in model] == ["Embedding", "Block", "Block", "LayerNorm", "Linear"]


def test_an_untrained_model_knows_nothing_and_a_few_steps_teach_it() -> None:
    task = PythonSource(**{**SMALL, "width": 32})
    torch.manual_seed(0)
    model = task.build_model()
    batch = task.to_batch(task.dataset("train").slice(0, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = task.loss(model(batch["inputs"]), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < 3.5
    outputs = model(batch["inputs"]).detach()
    metrics = task.metrics(outputs, batch)
    assert float(metrics["bits_per_byte"]) == pytest.approx(float(task.loss(outputs, batch)) / math.log(2))
    assert 0.1 < float(metrics["accuracy"]) <= 1


def test_dropout_is_for_training_alone() -> None:
    task = PythonSource(**{**SMALL, "dropout": 0.5})  # type: ignore[arg-type]
    model, inputs = task.build_model(), task.example_inputs()[None]
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(TaskError, match=r"task\.heads must divide width \(128\) evenly, got 3"):
        PythonSource(heads=3)


def test_too_little_text_for_one_sample_is_refused_saying_what_to_change() -> None:
    with pytest.raises(DataError, match=r"train data of python_source has 0 bytes.*use more files \(task\.num_files\)"):
        open_source(PythonSource(num_files=1).dataset("train"))
