"""Loading of what training and searching leave behind; what cannot be served is refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from orchestray.platform.errors import CheckpointError, ConfigError, RunNameError, TaskError
from orchestray.platform.task import TaskSource, build_task
from orchestray.serving.models.content import content_of, served_name
from orchestray.serving.models.errors import InputError
from orchestray.serving.models.load import load_served_model
from orchestray.serving.models.served import ServedModel
from orchestray.trainers.core.model_state import StateKeeper
from orchestray.trainers.saved.run import load_run
from orchestray.trainers.saved.trained_model import write_model
from support.pairs_task import pairs_run
from support.served import written_run

OWN_TASK = """
import pyarrow as pa
import torch
from torch import nn

class Own:
    def build_model(self): return nn.Linear(3, 2)
    def dataset(self, split): return pa.table({"x": [1.0, 2.0]})
    def to_batch(self, columns): return {"inputs": torch.ones(len(columns), 3) * 0.5}
    def loss(self, outputs, batch): return outputs.mean()
    def metrics(self, outputs, batch): return {}
"""


def test_a_run_is_served_with_the_answers_of_its_model(tmp_path: Path) -> None:
    run = written_run(tmp_path)
    served = load_served_model(run)
    assert (served.signature.name, served.signature.version) == ("digits", "1")
    sample = served.signature.parse(served.signature.example)
    (answer,) = served.run([sample])
    with torch.inference_mode():
        wanted = load_run(run).load_model()(torch.from_numpy(sample["inputs"])[None])[0]
    assert isinstance(answer, dict)
    np.testing.assert_allclose(answer["outputs"], wanted.numpy(), atol=1e-6)


def test_a_search_is_served_by_its_best_run_under_its_own_name(tmp_path: Path) -> None:
    search = tmp_path / "searched"
    search.mkdir()
    (search / "trials.jsonl").write_text("")
    with pytest.raises(RunNameError, match="has found no run yet"):
        load_served_model(search)
    written_run(search, "best")
    assert load_served_model(search).signature.name == "searched"
    assert served_name(search / "best") == "searched"


def test_an_ensemble_answers_with_the_mean_of_its_members(tmp_path: Path) -> None:
    members = [written_run(tmp_path, f"m{seed}", seed=seed) for seed in (1, 2)]
    models = [load_run(path).load_model() for path in members]
    tensors = {
        f"members.{index}.{name}": tensor
        for index, model in enumerate(models)
        for name, tensor in model.state_dict().items()
    }
    run = written_run(tmp_path, "both", tensors=tensors, model_json={"ensemble": {"members": 2, "average": "outputs"}})
    served = load_served_model(run)
    sample = served.signature.parse(served.signature.example)
    (answer,) = served.run([sample])
    assert isinstance(answer, dict)
    with torch.inference_mode():
        inputs = torch.from_numpy(sample["inputs"])[None]
        wanted = torch.stack([model(inputs)[0] for model in models]).mean(dim=0)
    np.testing.assert_allclose(answer["outputs"], wanted.numpy(), atol=1e-6)


def test_a_task_without_an_example_is_shown_by_the_first_row_of_its_data(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_TASK)
    task = {"type": f"{file}:Own", "arguments": {}, "file": str(file), "source": OWN_TASK}
    run = written_run(tmp_path, "own", tensors=dict(torch.nn.Linear(3, 2).state_dict()), model_json={"task": task})
    file.unlink()  # the run keeps its text
    assert load_served_model(run).signature.example == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("how", "names", "samples"),
    [
        (
            "mapping",
            ["ids", "mask"],
            [{"ids": [1, 2, 3, 4], "mask": [1, 1, 0, 1]}, {"ids": [9] * 4, "mask": [0.5] * 4}],
        ),
        ("tuple", ["inputs_0", "inputs_1"], [{"inputs_0": [1, 2, 3, 4], "inputs_1": [1, 1, 0, 1]}]),
    ],
)
def test_a_model_of_several_inputs_is_served_by_their_names(
    how: str, names: list[str], samples: list[Any], tmp_path: Path
) -> None:
    run = pairs_run(tmp_path, how)
    served = load_served_model(run, max_batch_size=2)
    assert [spec.name for spec in served.signature.inputs] == names
    assert [(spec.dtype, spec.shape) for spec in served.signature.inputs] == [("int64", (4,)), ("float32", (4,))]
    assert list(served.signature.example) == names
    model = load_run(run).load_model()
    ids, mask = (torch.stack([torch.tensor(sample[name]) for sample in samples]) for name in names)
    with torch.inference_mode():
        wanted = model(ids, mask.float(), *(["mean"] if how == "mapping" else []))
    for answer, row in zip(served.run([served.signature.parse(sample) for sample in samples]), wanted, strict=True):
        assert isinstance(answer, dict)
        np.testing.assert_allclose(answer["outputs"], row.numpy(), atol=1e-6)
    with pytest.raises(InputError, match=names[1]):
        served.signature.parse({names[0]: [1, 2, 3, 4]})


def test_a_model_that_takes_gradients_is_served(tmp_path: Path) -> None:
    run = pairs_run(tmp_path, "energy")
    served = load_served_model(run)
    (answer,) = served.run([served.signature.parse([0.1, 0.2, 0.3])])
    wanted = load_run(run).load_model()(torch.tensor([[0.1, 0.2, 0.3]]))
    assert isinstance(answer, dict)
    np.testing.assert_allclose(answer["force"], wanted["force"][0].numpy(), atol=1e-6)
    np.testing.assert_allclose(answer["energy"], wanted["energy"][0].detach().numpy(), atol=1e-6)


def test_inputs_that_do_not_count_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"a tuple of a tensor .* must count the samples"):
        load_served_model(pairs_run(tmp_path, "scalar"))


def test_a_trained_model_is_served_where_neither_its_data_nor_its_file_is(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [0.25, 1.0]}), tmp_path / "rows.parquet")
    file = tmp_path / "own.py"
    file.write_text(OWN_TASK.replace('pa.table({"x": [1.0, 2.0]})', f'pq.read_table("{tmp_path}/rows.parquet")'))
    file.write_text(file.read_text().replace("import pyarrow as pa", "import pyarrow.parquet as pq"))
    source = TaskSource.of_class(f"{file}:Own", {})
    task = build_task(source)
    write_model(tmp_path / "model", StateKeeper(task.build_model()).state(), {"task": source.to_json()}, task)
    run = written_run(tmp_path, "own", task={"type": f"{file}:Own"})
    shutil.rmtree(run / "model")
    (tmp_path / "model").rename(run / "model")
    (tmp_path / "rows.parquet").unlink()
    file.unlink()
    assert load_served_model(run).signature.example == [0.5, 0.5, 0.5]


def test_a_model_whose_data_showed_no_sample_says_why_it_is_not_served(tmp_path: Path) -> None:
    run = written_run(
        tmp_path, model_json={"interface": {"no_example": "it is empty", "class_names": [], "lower_is_better": []}}
    )
    with pytest.raises(TaskError, match="cannot be served: it is empty"):
        load_served_model(run)


def test_what_cannot_be_served_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunNameError, match="there is no run"):
        load_served_model(tmp_path / "nothing")
    unfinished = written_run(tmp_path, "unfinished")
    shutil.rmtree(unfinished / "model")
    with pytest.raises(CheckpointError, match="has not finished"):
        load_served_model(unfinished)
    gone = written_run(tmp_path, "gone")
    description = json.loads((gone / "model" / "model.json").read_text())
    description["task"]["type"] = "no_such_package.tasks:Task"
    (gone / "model" / "model.json").write_text(json.dumps(description))
    with pytest.raises(TaskError, match="gone cannot be served: there is no module no_such_package"):
        load_served_model(gone)
    corrupt = written_run(tmp_path, "corrupt")
    weights = corrupt / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 0xFF
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"corrupt cannot be served: .*damaged"):
        load_served_model(corrupt)
    weights.write_bytes(content[:-20])
    with pytest.raises(CheckpointError, match="damaged"):
        load_served_model(corrupt)


def test_a_model_of_another_shape_than_its_task_builds_is_refused(tmp_path: Path) -> None:
    run = written_run(tmp_path, tensors={"0.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="cannot be served"):
        load_served_model(run)


def test_a_run_that_was_trained_anew_is_refused_to_who_wants_the_model_that_was_there_before(tmp_path: Path) -> None:
    run, other = written_run(tmp_path), written_run(tmp_path, "other", seed=1)
    content = content_of(run)
    before = load_served_model(run, content=content)
    shutil.copytree(run / "model", tmp_path / "kept")
    shutil.copytree(other / "model", run / "model", dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match=r"written anew since this version was started.*--update"):
        load_served_model(run, content=content)
    load_served_model(run)
    shutil.copytree(tmp_path / "kept", run / "model", dirs_exist_ok=True)
    sample = before.signature.parse(before.signature.example)
    (wanted,), (answer,) = before.run([sample]), load_served_model(run, content=content).run([sample])
    assert isinstance(wanted, dict)
    assert isinstance(answer, dict)
    np.testing.assert_array_equal(answer["outputs"], wanted["outputs"])


def test_a_model_that_the_memory_does_not_hold_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ServedModel, "warm_up", full)
    with pytest.raises(CheckpointError, match=r"the memory of cpu does not hold its model.*set update.free_first"):
        load_served_model(written_run(tmp_path))


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    there = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"asks for {there + 1} GPU, and torch finds {there or 'none'} here"):
        load_served_model(written_run(tmp_path), gpus=there + 1)
