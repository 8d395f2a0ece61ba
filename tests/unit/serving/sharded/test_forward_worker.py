"""A model divided over workers answers as the whole one; each holds its part; a failure is reported, not waited for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.serving.models.content import content_of
from orchestray.serving.models.errors import ModelError
from orchestray.serving.models.quantize import num_bytes
from orchestray.serving.sharded.forward_worker import Arrays, ForwardWorker, StageFailedError
from orchestray.serving.sharded.partition import ServedNetwork, plain_model
from orchestray.trainers.saved.run import load_run
from support.pairs_task import pairs_run
from support.served import written_run
from support.threads import run_replicas

SOURCE = {"type": "python_source", "context": 16, "width": 32, "depth": 4, "heads": 4}
DIGITS = {"type": "digits", "hidden": [32, 24, 16]}


def inputs_of(task: dict[str, Any], num_samples: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    if task["type"] == "digits":
        return {"inputs": rng.random((num_samples, 64), dtype=np.float32)}
    return {"inputs": rng.integers(0, 256, (num_samples, 16))}


def served(
    run: Path, network: ServedNetwork, batches: list[Arrays], precision: str = "float32"
) -> tuple[list[np.ndarray[Any, Any]], list[Any]]:
    """Return the answers to batches that follow one another, and what each worker holds; workers are threads."""
    torch.set_num_threads(1)

    def work(world: Collective) -> tuple[list[Arrays | None], dict[str, Any]]:
        worker = ForwardWorker(run / "model", network, False, precision)
        held = worker.connect(world)
        is_first = world.rank < network.tensor
        sizes = [len(next(iter(batch.values()))) for batch in batches]
        answers = [worker.run(n, batch if is_first else None) for n, batch in zip(sizes, batches, strict=True)]
        world.barrier()
        worker.close()
        return answers, held

    results = run_replicas(network.size, work)
    found = [answers for answers, _ in results if all(answer is not None for answer in answers)]
    assert len(found) == 1
    return [answer["outputs"] for answer in found[0] if answer is not None], [held for _, held in results]


@pytest.mark.parametrize(
    "network",
    [
        ServedNetwork(pipeline=2),
        ServedNetwork(pipeline=3, microbatches=1, split="equal"),
        ServedNetwork(pipeline=2, microbatches=5, split=("2",)),
        ServedNetwork(tensor=2),
        ServedNetwork(tensor=2, pipeline=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("task", [SOURCE, DIGITS], ids=["python_source", "digits"])
def test_the_answers_are_those_of_the_whole_model(tmp_path: Path, task: dict[str, Any], network: ServedNetwork) -> None:
    run = written_run(tmp_path, task=task)
    model = load_run(run).load_model()
    batches = [inputs_of(task, size, seed=size) for size in (1, 4, 7, 2)]
    answers, held = served(run, network, batches)
    for batch, answer in zip(batches, answers, strict=True):
        with torch.no_grad():
            whole = model(torch.from_numpy(batch["inputs"])).numpy()
        np.testing.assert_allclose(answer, whole, rtol=1e-5, atol=1e-6)
    assert max(worker["bytes"] for worker in held) < num_bytes(model)


@pytest.mark.parametrize("how", ["mapping", "tuple"])
@pytest.mark.parametrize("network", [ServedNetwork(pipeline=2), ServedNetwork(tensor=2)], ids=str)
def test_a_model_of_several_inputs_is_divided(tmp_path: Path, how: str, network: ServedNetwork) -> None:
    run = pairs_run(tmp_path, how)
    names = ["ids", "mask"] if how == "mapping" else ["inputs_0", "inputs_1"]
    rng = np.random.default_rng(0)
    batch = {names[0]: rng.integers(0, 20, (5, 4)), names[1]: rng.random((5, 4), dtype=np.float32)}
    (answer,), held = served(run, network, [batch])
    model = load_run(run).load_model()
    with torch.no_grad():
        whole = model(*(torch.from_numpy(batch[name]) for name in names), *(["mean"] if how == "mapping" else []))
    np.testing.assert_allclose(answer, whole.numpy(), rtol=1e-5, atol=1e-6)
    assert max(worker["bytes"] for worker in held) < num_bytes(model)


def test_a_pipeline_holds_each_tensor_once_and_a_stage_is_built_without_the_memory_of_the_others(
    tmp_path: Path,
) -> None:
    run = written_run(tmp_path, task=SOURCE)
    model = load_run(run).load_model()
    _, held = served(run, ServedNetwork(pipeline=3), [inputs_of(SOURCE, 2)])
    names = [name for worker in held for name in worker["tensors"]]
    assert sorted(names) == sorted(model.state_dict())
    assert sum(worker["bytes"] for worker in held) == num_bytes(model)
    assert all(parameter.is_meta for parameter in plain_model(load_run(run).load_task()).parameters())


def test_the_balanced_cut_makes_the_stages_of_equal_blocks_even(tmp_path: Path) -> None:
    run = written_run(tmp_path, task={**SOURCE, "depth": 8, "width": 128})
    _, held = served(run, ServedNetwork(pipeline=4), [inputs_of(SOURCE, 2)])
    blocks = [sum(name.endswith("query_key_value.weight") for name in worker["tensors"]) for worker in held]
    assert blocks == [2, 2, 2, 2]


def test_a_worker_that_comes_later_takes_no_part_of_another_model_than_the_others_have(tmp_path: Path) -> None:
    run, other = written_run(tmp_path, task=SOURCE), written_run(tmp_path, "other", seed=1, task=SOURCE)
    content = content_of(run)

    def work(world: Collective) -> None:
        worker = ForwardWorker(run / "model", ServedNetwork(), content=content)
        shutil.copytree(other / "model", run / "model", dirs_exist_ok=True)
        for _ in range(2):  # what it has read of the other is forgotten
            with pytest.raises(CheckpointError, match="written anew since this version was started"):
                worker.connect(world)
        worker.close()
        with pytest.raises(CheckpointError, match="written anew since this version was started"):
            ForwardWorker(run / "model", ServedNetwork(), content=content)

    run_replicas(1, work)


def test_a_batch_that_the_model_fails_on_fails_on_every_stage_and_the_next_is_answered(tmp_path: Path) -> None:
    run = written_run(tmp_path, task=SOURCE)
    right, wrong = inputs_of(SOURCE, 3), {"inputs": np.full((3, 16), 999)}
    network = ServedNetwork(pipeline=3, microbatches=2)

    def work(world: Collective) -> list[Any]:
        worker = ForwardWorker(run / "model", network)
        worker.connect(world)
        found: list[Any] = []
        for batch in (right, wrong, right):
            try:
                found.append(worker.run(3, batch if world.rank == 0 else None))
            except (ModelError, StageFailedError) as error:
                found.append(type(error))
        world.barrier()
        worker.close()
        return found

    first, second, last = run_replicas(3, work)
    assert first[1] is ModelError
    assert second[1] is StageFailedError
    assert last[1] is StageFailedError
    np.testing.assert_array_equal(last[0]["outputs"], last[2]["outputs"])


def test_workers_that_cut_the_model_differently_are_refused(tmp_path: Path) -> None:
    run = written_run(tmp_path, task=DIGITS)

    def work(world: Collective) -> None:
        worker = ForwardWorker(run / "model", ServedNetwork(pipeline=2, split=("2" if world.rank == 0 else "4",)))
        with pytest.raises(ModelError, match=r"differently: worker 0 before 0, 2, worker 1 before 0, 4\. Give all"):
            worker.connect(world)
        worker.close()

    run_replicas(2, work)


def test_the_parts_are_cast_as_the_model_was_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {name: tensor.double() for name, tensor in plain_model_of(DIGITS).state_dict().items()}
    run = written_run(tmp_path, task=DIGITS, tensors=tensors, model_json={"precision": "float64"})
    batch = inputs_of(DIGITS, 3)
    answers, _ = served(run, ServedNetwork(pipeline=2), [batch])
    with torch.no_grad():
        whole = load_run(run).load_model()(torch.from_numpy(batch["inputs"]).double()).numpy()
    assert answers[0].dtype == np.float64
    np.testing.assert_allclose(answers[0], whole, rtol=1e-12)


@pytest.mark.parametrize("network", [ServedNetwork(pipeline=2), ServedNetwork(tensor=2)], ids=str)
def test_in_bfloat16_the_parts_compute_what_the_whole_does_in_it(tmp_path: Path, network: ServedNetwork) -> None:
    tensors = {name: 4 * tensor for name, tensor in plain_model_of(SOURCE).state_dict().items()}
    run = written_run(tmp_path, task=SOURCE, tensors=tensors)
    model, batch = load_run(run).load_model(), inputs_of(SOURCE, 5)
    (answer,), _ = served(run, network, [batch], "bfloat16")
    with torch.no_grad():
        full = model(torch.from_numpy(batch["inputs"])).numpy()
        with torch.autocast("cpu", torch.bfloat16):
            whole = model(torch.from_numpy(batch["inputs"])).float().numpy()
    assert answer.dtype == np.float32
    assert np.linalg.norm(answer - whole) < 0.02 * np.linalg.norm(whole)
    assert not np.allclose(answer, full, rtol=1e-4)


def plain_model_of(task: dict[str, Any]) -> Any:
    from orchestray.platform.task import TaskSource
    from orchestray.trainers.tasks import build

    arguments = {key: value for key, value in task.items() if key != "type"}
    return build(TaskSource(task["type"], arguments)).build_model()


def test_a_damaged_model_is_found_before_it_answers(tmp_path: Path) -> None:
    run = written_run(tmp_path, task=DIGITS)
    file = run / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        served(run, ServedNetwork(pipeline=2), [])


def test_an_ensemble_is_not_divided(tmp_path: Path) -> None:
    run = written_run(tmp_path, task=DIGITS, model_json={"ensemble": {"members": 2, "average": "outputs"}})
    with pytest.raises(ConfigError, match="ensemble"):
        ForwardWorker(run / "model", ServedNetwork(pipeline=2))


@pytest.mark.parametrize(
    ("task", "model_json"),
    [
        ({"type": "support.stateful:StatefulTask", "kind": "halved"}, {}),
        (DIGITS, {"buffers": {"0.kept": ["float32", [3, 4], True]}}),
    ],
)
def test_a_model_that_is_loaded_as_a_whole_is_not_divided(tmp_path: Path, task: Any, model_json: Any) -> None:
    run = written_run(tmp_path, task=task, model_json=model_json)
    with pytest.raises(ConfigError, match="Set its tensor and pipeline to 1"):
        served(run, ServedNetwork(pipeline=2), [])
