"""Learning from another run's outputs: the loss against a computation by hand, any layout, and teachers that misfit."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import save_model
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.task import TaskSource
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.core.members import describe_members
from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.distill.distillation import (
    DistilledTask,
    distance,
    problem_of,
    soft_divergence,
    with_distillation,
)
from orchestray.trainers.ensemble.ensemble import Ensemble
from orchestray.trainers.validate.refuse import check_layout
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.training import Rows, digits, furthest, regression, same_bits


def teacher(seed: int = 0, **arguments: Any) -> nn.Module:
    torch.manual_seed(seed)
    return digits(**{"hidden": [40], **arguments}).build_model().double()


def some_batch(num_samples: int = 6) -> dict[str, Tensor]:
    return {"inputs": torch.rand(num_samples, 64, dtype=torch.float64), "targets": torch.arange(num_samples) % 10}


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_is_that_of_the_paper_computed_sample_by_sample(temperature: float, weight: float) -> None:
    model, batch = teacher(), some_batch()
    outputs = torch.randn(6, 10, dtype=torch.float64)
    task = DistilledTask(digits(), lambda: model, temperature=temperature, weight=weight)
    expected = 0.0
    for row in range(6):
        z, v = outputs[row].tolist(), model(batch["inputs"])[row].tolist()
        total_z = sum(math.exp(a / temperature) for a in z)
        total_v = sum(math.exp(a / temperature) for a in v)
        divergence = 0.0
        for a, b in zip(z, v, strict=True):
            p = math.exp(b / temperature) / total_v
            divergence += p * (math.log(p) - math.log(math.exp(a / temperature) / total_z))
        hard = -math.log(math.exp(z[row]) / sum(math.exp(a) for a in z))
        expected += ((1 - weight) * hard + weight * temperature**2 * divergence) / 6
    assert float(task.loss(outputs, batch)) == pytest.approx(expected, rel=0, abs=1e-12)


def test_one_logit_a_sample_is_refused_as_its_softmax_says_nothing() -> None:
    outputs, targets = torch.randn(6, 1), torch.arange(6) % 2
    assert "the outputs have one logit a sample" in str(problem_of(outputs, outputs, targets))
    assert problem_of(outputs, outputs, targets.float()) is None
    two = torch.randn(6, 2)
    assert problem_of(two, two, targets) is None


def test_at_high_temperatures_the_divergence_matches_logits() -> None:
    """Check section 2.1: T^2 KL tends to half the variance over the classes of the difference of the logits."""
    student, teacher_outputs = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    limit = float((student - teacher_outputs).var(1, correction=0).mean() / 2)
    apart = [abs(float(soft_divergence(student, teacher_outputs, t)) - limit) for t in (10.0, 100.0, 1000.0)]
    assert apart[2] < 1e-3 < apart[0]
    assert apart[2] < apart[1] < apart[0]


def test_at_low_temperatures_the_teacher_names_one_class() -> None:
    """Check that T KL tends, as T goes to 0, to how far the teacher's class is below the student's greatest logit."""
    student, teacher_outputs = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    below = student.max(1).values - student.gather(1, teacher_outputs.argmax(1, keepdim=True)).squeeze(1)
    temperature = 1e-4
    found = soft_divergence(student, teacher_outputs, temperature) / temperature
    assert float(found) == pytest.approx(float(below.mean()), abs=1e-3)


def test_the_gradient_is_that_of_the_cross_entropy_with_soft_targets() -> None:
    student = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    teacher_outputs = torch.randn(5, 8, dtype=torch.float64)
    found = torch.autograd.grad(soft_divergence(student, teacher_outputs, 3.0), student)[0]
    soft = functional.cross_entropy(student / 3.0, (teacher_outputs / 3.0).softmax(1)) * 9.0
    assert float((found - torch.autograd.grad(soft, student)[0]).abs().max()) <= 1e-14


def test_a_class_that_teacher_and_student_rule_out_changes_neither_the_distance_nor_its_gradient() -> None:
    drawn = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(4, 3, generator=drawn, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    masked = [functional.pad(logits, (1, 0), value=-math.inf) for logits in (student, teacher)]
    plain, beside = soft_divergence(student, teacher, 2.0), soft_divergence(masked[0], masked[1], 2.0)
    torch.testing.assert_close(beside, plain)
    torch.testing.assert_close(torch.autograd.grad(beside, student), torch.autograd.grad(plain, student))


def test_sequences_and_images_count_their_positions() -> None:
    rows = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    flat = float(distance(*rows, {"targets": torch.zeros(12, dtype=torch.long)}, 2.0))
    sequence = [tensor.reshape(3, 4, 5) for tensor in rows]
    assert float(distance(*sequence, {"targets": torch.zeros(3, 4).long()}, 2.0)) == pytest.approx(flat, abs=1e-15)
    image = [tensor.reshape(3, 2, 2, 5).permute(0, 3, 1, 2) for tensor in rows]
    assert float(distance(*image, {"targets": torch.zeros(3, 2, 2).long()}, 2.0)) == pytest.approx(flat, abs=1e-15)


def test_numbers_are_compared_by_the_squared_error() -> None:
    outputs, teacher_outputs = torch.randn(6, 1), torch.randn(6, 1)
    assert torch.equal(
        distance(outputs, teacher_outputs, {"targets": torch.randn(6)}, 2.0),
        (outputs - teacher_outputs).square().mean(),
    )


def test_the_teacher_is_made_once_judges_in_evaluation_mode_and_learns_nothing() -> None:
    model, batch = teacher(dropout=0.5), some_batch()
    made: list[nn.Module] = []
    task = DistilledTask(digits(), lambda: (made.append(model), model)[1], weight=1.0)
    outputs = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    first, second = task.loss(outputs, batch), task.loss(outputs, batch)
    first.backward()
    assert made == [model]
    assert torch.equal(first, second)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert outputs.grad is not None


def test_without_a_weight_no_teacher_is_asked_for() -> None:
    task = DistilledTask(digits(), lambda: pytest.fail("it was asked for"), weight=0.0)
    batch = some_batch()
    outputs = torch.randn(6, 10, dtype=torch.float64)
    assert torch.equal(task.loss(outputs, batch), digits().loss(outputs, batch))


def test_an_ensemble_teaches_with_its_mean_whichever_it_is_of() -> None:
    members, batch = [teacher(0), teacher(1)], some_batch()
    x = batch["inputs"]
    for average in ("outputs", "probabilities"):
        ensemble = Ensemble(members, average)  # type: ignore[arg-type]
        teacher_outputs = DistilledTask(digits(), lambda ensemble=ensemble: ensemble).teacher_outputs(batch)
        with torch.no_grad():
            logits = [member(x) for member in members]
            soft = sum(each.softmax(1) for each in logits) / 2
            expected = sum(logits) / 2 if average == "outputs" else torch.as_tensor(soft).log()
        assert torch.allclose(teacher_outputs, torch.as_tensor(expected), rtol=0, atol=1e-12)


class Mixed(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10, dtype=torch.float64)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * scale
        return found


@pytest.mark.parametrize("is_mapping", [False, True])
@pytest.mark.parametrize("num_members", [1, 2])
def test_a_teacher_is_called_with_several_inputs(num_members: int, is_mapping: bool) -> None:
    members, batch = [Mixed() for _ in range(num_members)], some_batch()
    x, scale = batch["inputs"], torch.rand(6, 1, dtype=torch.float64)
    given = {**batch, "inputs": {"scale": scale, "x": x} if is_mapping else (x, scale)}
    model = Ensemble(members) if num_members > 1 else members[0]
    found = DistilledTask(digits(), lambda: model).teacher_outputs(given)
    assert torch.allclose(found, sum(member(x, scale) for member in members) / num_members)
    with pytest.raises(ConfigError, match=r"cannot take this task's inputs, a tensor of shape \[6, 64\]"):
        DistilledTask(digits(), lambda: model).teacher_outputs(batch)


# -- under any scheme --------------------------------------------------------------------------------------------------


def distilled(**arguments: Any) -> Any:
    model = teacher(3)  # here: replicas that are threads share torch's generator
    return lambda: DistilledTask(digits(hidden=[24, 16], **arguments), lambda: model, temperature=3.0, weight=0.7)


FEW = {"validation_fraction": 0.02}


@cache
def taught_alone() -> LaidOut:
    return train_laid_out(distilled(**FEW), layout_settings(steps=4, validate_every_steps=4))


@pytest.mark.parametrize(
    ("network", "exchange"),
    [
        ({"data": 2}, {}),
        ({"pipeline": 2}, {}),
        ({"tensor": 2}, {}),
        ({"data": 2}, {"type": "averaging", "every": 1}),
        ({"data": 2}, {"shard": "optimizer"}),
        ({"data": 3}, {"shard": "gradients"}),
        ({"data": 2}, {"shard": "parameters"}),
        ({"pipeline": 2, "schedule": "zero_bubble"}, {}),
        ({"pipeline": 2, "schedule": "interleaved_1f1b", "split": "equal"}, {}),
        ({"data": 2, "tensor": 2, "pipeline": 2}, {}),
        ({"data": 2, "pipeline": 2}, {"shard": "optimizer"}),
        ({"data": 2, "tensor": 2}, {"shard": "parameters"}),
    ],
)
def test_a_student_learns_the_same_under_any_scheme(network: dict[str, Any], exchange: dict[str, Any]) -> None:
    one = taught_alone()
    found = train_laid_out(distilled(**FEW), layout_settings(network, exchange, steps=4, validate_every_steps=4))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12
    ours, theirs = found.outcome.final["validation"], one.outcome.final["validation"]
    assert ours == pytest.approx(theirs, rel=0, abs=1e-6)  # the accuracy is a float32
    assert ours is not None
    assert ours["task_loss"] != ours["loss"]


def test_an_ensemble_may_be_taught() -> None:
    settings = layout_settings({"data": 2}, {"type": "independent"}, steps=3, validate_every_steps=3)
    found = train_laid_out(distilled(), settings)
    alone = train_laid_out(distilled(), layout_settings(steps=3))
    own = {k.removeprefix("members.0."): v for k, v in found.weights.items() if k.startswith("members.0.")}
    assert same_bits(own, alone.weights)
    assert {"loss", "accuracy", "task_loss", "members"} == set(found.outcome.final["validation"] or {})


def test_regression_learns_the_teachers_numbers() -> None:
    rows = regression(num_samples=64)
    torch.manual_seed(1)
    model = rows.build_model().double()
    settings = layout_settings(steps=150, batch_size=32, optimizer={"type": "adam", "lr": 0.02})
    found = train_laid_out(lambda: DistilledTask(rows, lambda: model, weight=1.0), settings)
    assert found.losses[-1] < 0.02 * found.losses[0]


# -- a run as the teacher ----------------------------------------------------------------------------------------------


def trained_run(folder: Path, name: str, num_members: int = 0, **task: Any) -> str:
    config = load_train_config(
        {
            "name": name,
            "task": {"type": "digits", "hidden": [16], **task},
            "train": {"batch_size": 8, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
        }
    )
    source = TaskSource.from_config(config.task)
    from orchestray.trainers import tasks

    models = [tasks.build(source).build_model() for _ in range(max(1, num_members))]
    model = Ensemble(models) if num_members else models[0]
    described = {"task": source.to_json(), **describe_members(num_members, {"average": "outputs"})}
    with RunDirectory.create(folder, name) as run:
        run.write_config(dump_yaml(config))
        save_model(run.paths.model, model_tensors(model), described)
        return str(run.path)


def config_of(directory: str, **task: Any) -> Any:
    return load_train_config(
        {
            "name": "student",
            "task": {"type": "digits", "hidden": [8], **task},
            "train": {"batch_size": 8, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
            "distill": {"teacher": directory, "temperature": 3.0, "weight": 1.0},
        }
    )


@pytest.mark.parametrize("num_members", [0, 2])
def test_a_run_directory_is_a_teacher(tmp_path: Path, num_members: int) -> None:
    config = config_of(trained_run(tmp_path, "a", num_members))
    check_layout(config)
    task = with_distillation(digits(hidden=[8]), config.distill.model_dump(), double=True)
    batch = some_batch()
    outputs = torch.randn(6, 10, dtype=torch.float64)
    assert isinstance(task, DistilledTask)
    teacher_outputs = task.teacher_outputs(batch)
    assert teacher_outputs.dtype == torch.float64
    assert torch.equal(task.loss(outputs, batch), soft_divergence(outputs, teacher_outputs, 3.0))
    assert with_distillation(digits(), None, double=True) is not task


@pytest.mark.parametrize(
    ("teaches", "learns", "said"),
    [
        ({"model": "cnn", "hidden": [8]}, {}, "the teacher cannot take this task's inputs, a tensor of shape [1, 64]"),
        (
            {},
            {"type": "orchestray.trainers.tasks.digits_networks:TreeNetDigits", "hidden": [8, 8]},
            "the teacher answers a batch with a tensor of shape [1, 10], the student with a tensor of shape [1, 4, 10]",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, teaches: dict[str, Any], learns: dict[str, Any], said: str
) -> None:
    config = config_of(trained_run(tmp_path, "a", **teaches), **learns)
    with pytest.raises(ConfigError) as caught:
        check_layout(config, label="student.yaml")
    assert str(caught.value).startswith("student.yaml: distill.teacher: ")
    assert said in str(caught.value)


def test_a_damaged_teacher_is_refused_before_anything_starts(tmp_path: Path) -> None:
    directory = trained_run(tmp_path, "a")
    config = config_of(directory)
    (Path(directory) / "model" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"distill\.teacher: .* is damaged"):
        check_layout(config)


def test_batches_that_tell_nothing_of_the_outputs_are_refused() -> None:
    same = torch.zeros(4, 3)
    for batch, said in (
        ({}, "no `targets`"),
        ({"targets": torch.zeros(5).long()}, "no dimension of the outputs"),
    ):
        with pytest.raises(ConfigError, match=said):
            distance(same, same, batch, 2.0)
    with pytest.raises(ConfigError, match="one tensor with another; the student answers with a tuple"):
        distance((same,), same, {"targets": torch.zeros(4).long()}, 2.0)


# -- losses that ask for more ------------------------------------------------------------------------------------------


class Rising(Rows):
    """A task whose loss rises with the step, and compares the samples of all workers."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor], step: int, gather: Any) -> Tensor:  # type: ignore[override]
        found, targets = gather((outputs.reshape(-1), batch["targets"]))
        return (found - targets).std() * step

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


def test_the_task_s_own_loss_in_a_validation_has_the_step_and_the_samples_of_all_workers() -> None:
    inputs = torch.randn(40, 3, dtype=torch.float64).numpy()

    def task() -> DistilledTask:
        own = Rising(inputs, inputs.sum(1), lambda: nn.Linear(3, 1))
        return DistilledTask(own, lambda: nn.Linear(3, 1).double().requires_grad_(False), weight=0.0)

    for data in (1, 2):
        settings = layout_settings({"data": data, "microbatches": None}, steps=4, batch_size=20)
        final = train_laid_out(task, settings).outcome.final["validation"]
        assert final["task_loss"] == pytest.approx(final["loss"], rel=1e-10)


def test_a_task_with_a_weight_is_refused() -> None:
    task = regression()
    task.weight = lambda batch: 1.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"uses weight, unknown to distillation, where .* have loss return a mean"):
        DistilledTask(task, lambda: nn.Linear(5, 1))
